"""Hundreds of calls in a step are planned for in groups."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_ext import DynamicGradientCheckpointing
from tests.lightning_ext.test_gradient_checkpointing import Module, batches, fit, same

WIDTH = 16


class Loop(nn.Module):
    """The same layers many times over."""

    def __init__(self, rounds: int, linked: bool) -> None:
        super().__init__()
        inner = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.blocks = nn.ModuleList(
            [nn.Sequential(*inner), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        )
        self.rounds, self.linked = rounds, linked

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x) if self.linked else x + block(x)
        return x


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:DynamicGradientCheckpointing. memory_budget=")
@pytest.mark.parametrize("budget", [0.5, 0.2, 0.1])
@pytest.mark.parametrize("linked", [True, False])
def test_many_calls(linked: bool, budget: float) -> None:
    torch.manual_seed(0)
    plain, x = Module(Loop(40, linked)), torch.randn(8, WIDTH)
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(budget)
    fit(plain, batches(x, 3))
    fit(module, batches(x, 3), callback)
    assert same(plain, module)
    report, plan = callback.report_, callback.plan_
    assert report is not None
    assert plan is report.plan
    assert plan.extra > 0
    assert report.measured is not None
    assert plan.peak * 0.9 <= report.measured <= plan.peak
    if linked:
        assert len(report.blocks) <= 64
        assert plan.fits
