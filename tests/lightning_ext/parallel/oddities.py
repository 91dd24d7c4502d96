"""Models and steps that are unusual: stages without parameters, random numbers in a step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lightning_ext.parallel.models import LENGTH, VOCABULARY, Module

HIDDEN = 6


class Flat(Module):
    """Some of its parts have no parameters: the first, the last, two in between."""

    def made(self, kind: str, blocks: int, heads: int) -> nn.Sequential:
        up, down = nn.Linear(LENGTH * VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        return nn.Sequential(nn.Flatten(), up, nn.ReLU(), down, nn.LogSoftmax(-1))

    def step(self, batch: Tensor) -> Tensor:
        x = F.one_hot(batch[:, :-1], VOCABULARY).to(next(self.parameters()).dtype)
        return F.nll_loss(self.model(x), batch[:, -1])


class Carry(nn.Module):
    """Takes and returns a pair, as one argument, as `nn.Sequential` hands it on."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, given = pair
        return torch.tanh(self.layer(x)), given


class Begin(nn.Module):
    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        return given, given


class Noisy(Module):
    """Draws what the model gets and what it has to predict, and finds both at its end again."""

    def __init__(self, kind: str = "noisy", *sizes: int) -> None:
        super().__init__(kind, *sizes)
        self.drawn: list[tuple[int, Tensor, float, float]] = []
        self.used: list[tuple[int, Tensor, Tensor]] = []

    def made(self, kind: str, blocks: int, heads: int) -> nn.Sequential:
        middle = (Carry(HIDDEN, HIDDEN) for _ in range(blocks))
        return nn.Sequential(Begin(), Carry(LENGTH + 1, HIDDEN), *middle, Carry(HIDDEN, 1))

    def step(self, batch: Tensor) -> Tensor:
        """Each library draws; a target of other draws than the input would not fit it."""
        x = batch.to(next(self.parameters()).dtype) / VOCABULARY
        noise, scale = torch.rand_like(x), float(np.random.rand())
        sign = 1.0 if random.random() < 0.5 else -1.0
        given = (x + scale * noise) * sign
        target = sign * noise.mean(-1, keepdim=True) * scale
        if self.trainer.training:
            self.drawn.append((self.trainer.global_step, noise, scale, sign))
        found, passed = self.model(given)
        assert torch.equal(passed, given)
        if self.trainer.training:
            self.used.append((self.trainer.global_step, given, target))
        return F.mse_loss(found, target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        raise NotImplementedError
