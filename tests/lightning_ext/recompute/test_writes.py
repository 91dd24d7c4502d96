"""Arguments that somebody writes to, or that are no plain tensors: weights are as without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ext import DynamicGradientCheckpointing
from tests.lightning_ext.test_gradient_checkpointing import Module, batches, fit, same

WIDTH = 16


def rows() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Inside(nn.Module):
    """Writes to the input of its first layer, once that has run."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.mlp, self.norm = nn.ReLU(), mlp(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        x += self.mlp(self.relu(x))
        out: Tensor = self.norm(x)
        return out


class Normed(nn.Module):
    """Writes to the output of a norm, which it needs later."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(F.relu_(self.norm(x)))
        return out


class Taker(nn.Module):
    """Takes its input in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.mlp, self.way = mlp(), way

    def forward(self, x: Any = None, y: Any = None) -> Any:
        if self.way == "second":
            out = self.mlp(x) * (1 + 0.01 * y.sum())
            y += 1.0
            return out
        if self.way == "keyword":
            y.mul_(0.9)
            return y + self.mlp(y.tanh())
        if self.way == "dict":
            x["x"] = x["x"] + self.mlp(x["x"])
            return x
        if self.way == "list":
            return self.mlp(torch.stack(x).mean(0))
        if self.way == "object":
            return Pair(x.x + self.mlp(x.x) * x.y, x.y * 1.1)
        return self.mlp(x.relu())


@dataclass
class Pair:
    x: Tensor
    y: Tensor


class Caller(nn.Module):
    """Gives blocks their input in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), way
        self.blocks = nn.ModuleList(Taker(way) for _ in range(5))
        self.latent = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.way == "expanded":
            x = self.latent.expand(8, WIDTH)
        count, grown, pair = torch.zeros(3), [x], Pair(x, x.new_ones(1))
        given = {"x": x}
        for block in self.blocks:
            if self.way == "second":
                x = block(x, count)
            elif self.way == "keyword":
                x = block(y=x)
            elif self.way == "dict":
                block(given)
                x = given["x"]
            elif self.way == "list":
                grown.append(block(grown))
                x = grown[-1]
            elif self.way == "object":
                pair = block(pair)
                x = pair.x
                pair.x = pair.x * 1.1
            elif self.way == "added":
                x += block(x)
            else:
                x = block(x)
        out: Tensor = self.last(x)
        return out


def stack(block: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(block() for _ in range(5)), nn.Linear(WIDTH, 3))


WAYS = ("second", "keyword", "dict", "list", "object", "added", "expanded")
ALONE = {"second", "keyword"}
MODELS: dict[str, tuple[Callable[[], nn.Module], type[nn.Module]]] = {
    "inside": (lambda: stack(Inside), Inside),
    "normed": (lambda: stack(Normed), Normed),
    **{way: (lambda way=way: Caller(way), Taker) for way in WAYS},  # type: ignore[misc]
}


@pytest.mark.filterwarnings("ignore:DynamicGradientCheckpointing. left alone")
@pytest.mark.filterwarnings("ignore:DynamicGradientCheckpointing. memory_budget=")
@pytest.mark.parametrize("budget", [0.7, 0.3])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_plain_run(name: str, budget: float) -> None:
    make, kind = MODELS[name]
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(Module(make()))
    plain, module = modules
    callback = DynamicGradientCheckpointing(budget, blocks=[kind])
    fit(plain, batches(rows(), 6))
    fit(module, batches(rows(), 6), callback)
    assert same(plain, module)
    assert len(module.seen) == 6
    assert ("exclude" in {d.action for d in callback.decisions_}) == (name in ALONE)
    if name not in ALONE:
        assert callback.plan_ is not None
        assert callback.plan_.extra > 0
    if name == "normed":
        assert callback.report_ is not None
        assert callback.report_.measured is not None
        assert callback.plan_ is not None
        assert callback.report_.measured <= callback.plan_.peak
