"""Budgets hold where predictions do not: what modules keep, blocks left out, odd batches."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.utils.data import DataLoader

from lightning_ext import DynamicGradientCheckpointing
from tests.lightning_ext.test_gradient_checkpointing import Module, Peaks, batches, fit, same

WIDTH = 64


class Attention(nn.Module):
    """Keeps its weights, for those who look at them later."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        self.weights = (q @ k.mT / 8).softmax(-1)
        out: Tensor = x + self.out(self.weights @ v)
        return out


def test_what_modules_keep_is_made_up_for() -> None:
    torch.manual_seed(0)
    plain, x = Module(nn.Sequential(*(Attention() for _ in range(8)))), torch.randn(4, 64, WIDTH)
    module, callback, peaks = copy.deepcopy(plain), DynamicGradientCheckpointing(0.3), Peaks()
    fit(plain, batches(x, 6))
    fit(module, batches(x, 6), peaks, callback)
    assert same(plain, module)
    assert {d.action for d in callback.decisions_[1:]} == {"tighten"}
    assert callback.report_ is not None
    assert peaks.peaks[1] > callback.report_.plan.budget
    assert peaks.peaks[-1] <= callback.report_.plan.budget


def test_what_modules_keep_is_told() -> None:
    torch.manual_seed(0)
    kept = list[Tensor]()

    class Hoards(Attention):
        def forward(self, x: Tensor) -> Tensor:
            y = self.qkv(self.norm(x))
            kept.append(y)
            out: Tensor = x + self.out(y.chunk(3, -1)[0].tanh())
            return out

    class Clears(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            kept.clear()

    module = Clears(nn.Sequential(*(Hoards() for _ in range(8))))
    callback = DynamicGradientCheckpointing(0.2, blocks=[Hoards])
    with pytest.warns(UserWarning, match="something keeps what blocks have saved"):
        fit(module, batches(torch.randn(4, 64, WIDTH), 8), callback)


class LayerDrop(nn.Module):
    """Leaves out other blocks in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) > 0.4:
                x = x + block(x)
        return x


def test_blocks_that_are_left_out_by_chance() -> None:
    torch.manual_seed(1)
    plain, x = Module(LayerDrop()), torch.randn(4, WIDTH)
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.4)
    fit(plain, batches(x, 20))
    fit(module, batches(x, 20), callback)
    assert same(plain, module)
    assert callback.report_ is not None
    names = {block.name.rpartition(".")[0] for block in callback.report_.blocks}
    assert sum(name.startswith("network.blocks") for name in names) >= 6


@dataclass
class Rows:
    x: Tensor


class Opens(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(
            [batch.x if isinstance(batch, Rows) else batch["x"]], batch_idx
        )


@pytest.mark.parametrize("make", [Rows, lambda x: UserDict(x=x)])
def test_batches_that_torch_does_not_open(make: Any) -> None:
    sizes = (4, 4, 4, 32, 32, 64, 64)
    data = DataLoader([make(torch.randn(n, WIDTH)) for n in sizes], batch_size=None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
    module, callback, peaks = (
        Opens(nn.Sequential(*blocks)),
        DynamicGradientCheckpointing(0.4),
        Sizes(),
    )
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    fit(module, data, peaks, callback)
    assert [d.step for d in callback.decisions_] == [0, 3, 5]


class First(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch[0]).square().mean()
        return loss


def test_many_kinds_of_batches_follow_few_plans() -> None:
    """Boxes of a detector: every batch is of other shapes."""
    draw = torch.Generator().manual_seed(1)
    data = list[list[Tensor]]()
    for _ in range(60):
        counts = torch.randint(1, 20, (4,), generator=draw).tolist()
        data.append([torch.randn(8, WIDTH), *(torch.randn(n, 4) for n in counts)])
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
    plain = First(nn.Sequential(*blocks))
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.4)
    loader: DataLoader[Any] = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    fit(plain, loader)
    fit(module, loader, callback)
    assert same(plain, module)
    assert 10 < sum(d.action == "plan" for d in callback.decisions_) < 25


class Sizes(Peaks):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        super().on_train_batch_start(trainer, pl_module, [])


class Tracked(pl.Callback):
    """What torch's own tracker counts in each step, without parameters and their gradients."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.tracker = MemTracker()
        self.tracker.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.tracker.__exit__(None, None, None)
        found = self.tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        kept = found[_MemRefType.PARAM] + found[_MemRefType.GRAD]
        self.peaks.append(found["Total"] - kept)


@pytest.mark.matrix  # half a minute each
@pytest.mark.parametrize("budget", [0.8, 0.6, 0.4, 0.2])
def test_torchs_own_tracker_counts_what_is_predicted(budget: float) -> None:
    """It also counts gradients on their way, of at most half a block."""
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True) for _ in range(8))
    module, callback = Module(nn.Sequential(*layers)), DynamicGradientCheckpointing(budget)
    tracked = Tracked()
    fit(module, batches(torch.randn(8, 32, WIDTH), 4), tracked, callback)
    assert callback.report_ is not None
    plan = callback.report_.plan
    assert plan.peak <= plan.budget
    assert plan.peak <= tracked.peaks[-1] <= plan.peak + plan.budget / budget / 8 / 2
