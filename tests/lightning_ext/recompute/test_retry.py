"""A step that is out of memory is run again as if it had not been run, or not at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ext import DynamicGradientCheckpointing
from tests.lightning_ext.test_gradient_checkpointing import Module, fit, same

WIDTH = 16


def data(key: str | None = None) -> Any:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    steps = [{key: x.clone(), "y": x} if key else [x.clone()] for _ in range(8)]
    return DataLoader(steps, batch_size=None)  # type: ignore[arg-type]


class Short(Module):
    """Is out of memory once, in the fourth step, before or after it has done something."""

    after, failed = True, True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fails = batch_idx == 3 and not self.failed
        if fails and not self.after:
            self.fail()
        loss = self.loss(batch, batch_idx)
        if fails:
            self.fail()
        return loss

    def fail(self) -> None:
        self.failed = True
        raise torch.OutOfMemoryError("too little")

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


class Replaced(Short):
    """A buffer that is replaced."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.register_buffer("mean", torch.zeros(()))

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.network(batch[0])
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean()
        found: Tensor = (out - self.mean).square().mean()
        return found


class Late(Short):
    """Running statistics that are written to later than in the first step."""

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        for m in self.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.train(batch_idx >= 2)
        return super().loss(batch, batch_idx)


class Modes(Short):
    """Modes and parameters that are as before only at its end."""

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        self.network.eval()
        self.network[1].requires_grad_(False)
        if batch_idx == 3 and not self.failed:
            self.fail()
        loss = super().loss(batch, batch_idx)
        self.network.train()
        self.network[1].requires_grad_(True)
        return loss


class Takes(Short):
    """Takes its input out of the batch."""

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        return super().loss([batch.pop("x")], batch_idx)


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Tanh())
        for _ in range(4)
    )
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 3))


@pytest.mark.filterwarnings("ignore:DynamicGradientCheckpointing. a step was out of memory")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [Short, Replaced, Late, Modes, Takes])
def test_all_is_as_before(kind: type[Short], accumulate: int) -> None:
    key = "x" if kind is Takes else None
    plain, options = kind(network()), {"accumulate_grad_batches": accumulate}
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.9)
    module.failed = False
    expected = fit(plain, data(key), **options)
    found = fit(module, data(key), callback, **options)
    assert module.failed
    assert same(plain, module)
    assert found.callback_metrics == expected.callback_metrics
    assert callback.decisions_[0].action == "plan"
    assert "tighten" in {d.action for d in callback.decisions_[1:]}


def test_a_step_that_has_written_to_its_batch_is_not_run_again() -> None:
    class Writes(Short):
        def loss(self, batch: Any, batch_idx: int) -> Tensor:
            batch[0].mul_(0.5)
            return super().loss(batch, batch_idx)

    module, callback = Writes(network()), DynamicGradientCheckpointing(0.9)
    module.failed = False
    with pytest.raises(torch.OutOfMemoryError):
        fit(module, data(), callback)
    assert [d.action for d in callback.decisions_] == ["plan"]
