"""Steps that run out of memory are run again, with less kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ext import DynamicGradientCheckpointing
from lightning_ext._compat import pl
from lightning_ext.recompute.ledger import Ledger, counting
from tests.lightning_ext.test_gradient_checkpointing import (
    batches,
    fit,
    made,
    same,
)


class Meter(Ledger):
    """Runs out of memory as a device does."""

    limit = 10**12

    def hold(self, tensor: Tensor) -> int:
        size = super().hold(tensor)
        if self.now > self.limit:
            raise torch.OutOfMemoryError(f"{self.now} of {self.limit} bytes")
        return size


class Metered(pl.Callback):
    """From some step on, memory is short."""

    def __init__(self, after: int, limit: int) -> None:
        self.after, self.limit = after, limit

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, i: int) -> None:
        self.meter = Meter([*pl_module.parameters(), *pl_module.buffers(), *batch])
        self.meter.limit = self.limit if i >= self.after else 10**12
        self.context = counting(self.meter)
        self.context.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.context.__exit__(None, None, None)

    def on_exception(self, *_: Any) -> None:
        self.context.__exit__(None, None, None)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["transformer", "cnn"])
def test_out_of_memory(name: str, accumulate: int) -> None:
    plain, x = made(name)
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.9)
    options = {"accumulate_grad_batches": accumulate}
    expected = fit(plain, batches(x), **options)
    probe = DynamicGradientCheckpointing(0.9)
    fit(copy.deepcopy(plain), batches(x), probe)
    assert probe.report_ is not None
    limit = int(0.45 * probe.report_.plan.plain_peak)
    with pytest.warns(UserWarning, match="a step was out of memory"):
        found = fit(module, batches(x), Metered(5, limit), callback, **options)
    assert same(plain, module)  # random numbers, running statistics and gradients as well
    assert found.callback_metrics == expected.callback_metrics
    tightened = [d for d in callback.decisions_ if d.action == "tighten"]
    assert tightened
    assert sorted(set(module.seen)) == list(range(10))
    assert len(module.seen) == 10 + len(tightened)
    assert callback.plan_ is not None
    assert callback.plan_.peak <= limit


@pytest.mark.filterwarnings("ignore:DynamicGradientCheckpointing. a step was out of memory")
def test_out_of_memory_whatever_is_done() -> None:
    module, x = made("transformer")
    with (
        pytest.warns(UserWarning, match="does not fit: its activations need .* at least"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        fit(module, batches(x), Metered(5, 1000), DynamicGradientCheckpointing(0.9))
    with (
        pytest.warns(UserWarning, match="batch of 4x16 does not fit: every block was run again"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        fit(module, batches(x), Metered(0, 1000), DynamicGradientCheckpointing(0.9))
    assert "log" not in vars(module)
    fit(module, batches(x))
