"""A module whose metrics follow a given curve, and a look at what the rule is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler as S

from lightning_ext import PredictiveEarlyStopping
from strategies.early_stopping import PredictiveStopping, StopDecision
from tests.lightning_ext.helpers import Module, loader, trainer

BATCHES = 6  # in an epoch of `loader()`

NEVER: dict[str, Any] = {"min_improvement": 0.0}  # some improvement is always expected

Curve = Callable[[int], float | None]  # of optimizer steps


def flat(step: int) -> float:
    """Done after a few epochs: any rule stops it well before the end."""
    return 0.2 + math.exp(-step / BATCHES)


def falling(step: int) -> float:
    """Gets better all the time."""
    return 1000.0 - step


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Follows(Module):
    """Logs `val_loss` along a curve of the steps done; where that is None, it does not log."""

    def __init__(self, curve: Curve = flat, make: Any = sgd, where: str = "validation") -> None:
        super().__init__(make)
        self.curve, self.where = curve, where

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        # The same gradient whatever the batch: a run resumed inside an epoch gets other ones.
        zero = self.net(torch.ones(1, 6)).sum() * 1e-3
        return zero - zero.detach() + 1.0 / (1 + self.trainer.global_step)

    def tell(self, where: str) -> None:
        value = self.curve(self.trainer.global_step)
        if where == self.where and value is not None:
            self.log("val_loss", torch.tensor(value, dtype=torch.float64))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("other", 1.0)
        self.tell("validation")

    def on_train_epoch_end(self) -> None:
        self.tell("train_epoch_end")


@dataclass(frozen=True)
class Asked:
    """One evaluation, as it came to the rule."""

    value: float
    train_value: float
    budget: int | None
    hold: str | None
    wait: str | None
    left: str | None
    decision: StopDecision


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    seen: list[Asked] = []
    update = PredictiveStopping.update

    def spy(self: PredictiveStopping, *args: Any, **words: Any) -> StopDecision:
        decision = update(self, *args, **words)
        seen.append(Asked(*args, **words, decision=decision))
        return decision

    monkeypatch.setattr(PredictiveStopping, "update", spy)
    return seen


def stopping(**options: Any) -> PredictiveEarlyStopping:
    return PredictiveEarlyStopping(**{"monitor": "val_loss", "min_improvement": 0.05, **options})


def follow(*callbacks: Any, module: Any = None, ckpt: str | None = None, **options: Any) -> Any:
    module = module or Follows()
    t = trainer(*callbacks, **{"max_epochs": 30, **options})
    t.fit(module, loader(), loader(48), ckpt_path=ckpt)
    return t


def actions(callback: PredictiveEarlyStopping) -> list[str]:
    return [decision.action for decision in callback.decisions_]


def scheduled(scheduler: Any) -> Any:
    def make(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [scheduler(optimizer)]

    return make


def drops_at(epoch: int) -> Any:
    return scheduled(lambda optimizer: S.MultiStepLR(optimizer, [epoch]))
