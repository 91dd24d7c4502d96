"""What is set for the forward pass alone: modes, what is trained, kernels of attention."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_ext import DynamicGradientCheckpointing
from tests.lightning_ext.recompute.models import TransformerBlock
from tests.lightning_ext.test_gradient_checkpointing import Module, batches, fit, same


class Sets(Module):
    way = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch_idx)
        if self.way == "mode":
            self.network.eval()
        if self.way == "trained":
            self.network[1].requires_grad_(False)
        kernels = sdpa_kernel(SDPBackend.MATH) if self.way == "kernels" else nullcontext()
        with kernels:
            loss: Tensor = self.network(batch[0]).square().mean()
        self.network.train()
        self.network[1].requires_grad_(True)
        return loss


@pytest.mark.parametrize("budget", ["auto", 0.5])
@pytest.mark.parametrize("way", ["mode", "trained", "kernels"])
def test_weights_are_those_of_the_plain_run(way: str, budget: float | str) -> None:
    torch.manual_seed(0)
    plain = Sets(nn.Sequential(nn.Linear(16, 16), *(TransformerBlock(16, 0.2) for _ in range(4))))
    plain.way = way
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(budget)
    x = torch.randn(4, 8, 16)
    fit(plain, batches(x, 4))
    fit(module, batches(x, 4), callback)
    assert same(plain, module)
    assert module.seen == [0, 1, 2, 3]
    assert [d.action for d in callback.decisions_] == ["plan"]
    assert callback.plan_ is not None
    assert bool(callback.plan_.extra) == (budget == 0.5)
