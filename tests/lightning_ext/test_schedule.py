"""The rates foreseen are those that the run then has, and none of the user's objects is touched."""

from __future__ import annotations

import copy
import math
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.optim import lr_scheduler as S

from lightning_ext._progress import Remaining
from lightning_ext._schedule import RateSchedule, rates_ahead, rates_now
from tests.lightning_ext.curves import BATCHES, Follows, falling, follow

STEPS = 60  # in ten epochs


def chained(o: Any) -> Any:
    return S.ChainedScheduler([S.StepLR(o, 7, 0.5), S.ExponentialLR(o, 0.97)], o)


def sequential(o: Any) -> Any:
    warm = S.LinearLR(o, 0.1, total_iters=8)
    return S.SequentialLR(o, [warm, S.StepLR(o, 7, 0.5), S.CosineAnnealingLR(o, 20)], [8, 30])


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: S.LambdaLR(o, lambda step: 1 / (1 + step)),
    "two lambdas": lambda o: S.LambdaLR(o, [lambda s: 0.9**s, lambda s: 0.5 ** (s // 5)]),
    "multiplicative": lambda o: S.MultiplicativeLR(o, lambda step: 0.9),
    "milestones": lambda o: S.MultiStepLR(o, [4, 9, 33]),
    "step": lambda o: S.StepLR(o, 5),
    "constant": lambda o: S.ConstantLR(o, 0.3, 7),
    "cosine": lambda o: S.CosineAnnealingLR(o, 10, eta_min=1e-3),
    "restarts": lambda o: S.CosineAnnealingWarmRestarts(o, 6, 2),
    "one cycle": lambda o: S.OneCycleLR(o, 0.5, total_steps=STEPS),
    "cyclic": lambda o: S.CyclicLR(o, 0.01, 0.1, step_size_up=5),
    "polynomial": lambda o: S.PolynomialLR(o, 30, 2.0),
    "chained": chained,
    "sequential": sequential,
}
TRAINERS: dict[str, dict[str, Any]] = {
    "each epoch": {},
    "every third epoch": {"check_val_every_n_epoch": 3},
    "twice an epoch": {"val_check_interval": 0.5},
    "every 8 batches": {"val_check_interval": 8, "check_val_every_n_epoch": None},
    "accumulating": {"accumulate_grad_batches": 4},
}


class Foresees(Callback):
    """Keeps the rates foreseen at each evaluation, and those that then came."""

    def __init__(self) -> None:
        self.foreseen: list[list[list[float]]] = []
        self.came: list[list[float]] = []
        self.begun = True

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if self.begun:
            self.came.append(rates_now(trainer))
        self.begun = False

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        before = [copy.deepcopy(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs]
        self.foreseen.append(rates_ahead(trainer, 100, len(self.foreseen) + 1))
        assert str(before) == str([c.scheduler.state_dict() for c in trainer.lr_scheduler_configs])
        self.begun = True


def two_groups(module: Any, scheduler: Any, interval: str, frequency: int = 1) -> Any:
    head = list(module.net.head.parameters())
    rest = [p for n, p in module.net.named_parameters() if "head" not in n]
    optimizer = torch.optim.SGD([{"params": head}, {"params": rest, "lr": 0.02}], 0.1, 0.9)
    config = {"scheduler": scheduler(optimizer), "interval": interval, "frequency": frequency}
    return [optimizer], [config]


def assert_foreseen(callback: Foresees) -> None:
    assert len(callback.foreseen) > 2
    for done, foreseen in enumerate(callback.foreseen, start=1):
        came = callback.came[done:]
        assert foreseen[: len(came)] == came, done
        assert len(foreseen) >= len(came)


@pytest.mark.filterwarnings("ignore:A `.*` scheduler is using 'interval'. 'epoch':RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "twice an epoch") for name in SCHEDULERS),
        *(("sequential", options) for options in TRAINERS if options != "twice an epoch"),
    ],
)
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_what_is_foreseen_comes(name: str, options: str, interval: str) -> None:
    callback = Foresees()
    make = partial(two_groups, scheduler=SCHEDULERS[name], interval=interval)
    follow(callback, module=Follows(falling, make), max_epochs=10, **TRAINERS[options])
    assert_foreseen(callback)


@pytest.mark.parametrize(("interval", "frequency"), [("step", 2), ("step", 4), ("epoch", 3)])
def test_frequency(interval: str, frequency: int) -> None:
    callback = Foresees()
    make = partial(two_groups, scheduler=chained, interval=interval, frequency=frequency)
    follow(callback, module=Follows(falling, make), max_epochs=10, val_check_interval=2)
    assert_foreseen(callback)


class BringsItsOwn(Follows):
    """The rule for the rate is a method of the module, which must not be copied along."""

    def configure_optimizers(self) -> Any:
        return two_groups(self, lambda o: S.LambdaLR(o, self.factor), "epoch")

    def factor(self, epoch: int) -> float:
        return 0.1 ** (epoch > 4)

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("copied")


def test_a_method_of_the_module() -> None:
    callback = Foresees()
    follow(callback, module=BringsItsOwn(falling), max_epochs=10)
    assert_foreseen(callback)


def counting(o: Any) -> Any:
    """Rules that count how often they are asked, in all the places where a function can count."""
    seen, calls = [0], 0

    def in_a_list(step: int) -> float:
        seen[0] += 1
        return 1 / (1 + seen[0])

    def in_a_cell(step: int, told: list[int] = []) -> float:  # noqa: B006
        nonlocal calls
        calls += 1
        told.append(step)
        return 1 / (1 + calls + len(told) + seen[0])

    def drawn(step: int) -> float:
        return random.random() + np.random.rand() + float(torch.rand(()))

    inner = [S.LambdaLR(o, f) for f in ([in_a_list, in_a_cell], drawn)]
    return S.SequentialLR(o, inner, [4])


def test_what_rules_count_and_draw_is_put_back() -> None:
    class DoesNotAsk(Foresees):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.begun = True

    came = []
    for callback in (DoesNotAsk(), Foresees()):
        seed_everything(1, verbose=False)
        make = partial(two_groups, scheduler=counting, interval="epoch")
        follow(callback, module=Follows(falling, make), max_epochs=8)
        came.append(callback.came)
    assert came[0] == came[1]
    assert callback.foreseen[0][:3] == came[0][1:4]


class StepsItself(Follows):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


class Manual(Follows):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().step()


class Uncopyable(S.ExponentialLR):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("holds a lock")


@pytest.mark.parametrize(
    ("kind", "scheduler"),
    [(StepsItself, S.ExponentialLR), (Manual, S.ExponentialLR), (Follows, Uncopyable)],
)
def test_nothing_is_foreseen_where_nothing_is_known(kind: Any, scheduler: Any) -> None:
    callback = Foresees()
    make = partial(two_groups, scheduler=lambda o: scheduler(o, 0.9), interval="epoch")
    follow(callback, module=kind(falling, make), max_epochs=3)
    assert callback.foreseen == [[]] * 3


class Waits(Callback):
    def __init__(self) -> None:
        self.schedule = RateSchedule()
        self.reasons: list[str | None] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.schedule.begin(trainer, len(self.reasons))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        left = 9 - trainer.current_epoch
        rest = Remaining(left, left, 0, "epoch", left, left * BATCHES)
        self.reasons.append(self.schedule.reason_to_wait(trainer, rest, at_epoch_end=False))


def reasons(scheduler: Any, *callbacks: Any, **options: Any) -> list[str | None]:
    def make(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        config = {"scheduler": scheduler(optimizer), "monitor": "val_loss", **options}
        return {"optimizer": optimizer, "lr_scheduler": config}

    callback = Waits()
    follow(callback, *callbacks, module=Follows(lambda step: 1.0, make), max_epochs=10)
    return callback.reasons


def test_a_drop_is_waited_for_until_training_has_begun_with_it() -> None:
    words = "the learning rate is still to drop"
    assert reasons(lambda o: S.MultiStepLR(o, [4])) == [*[words] * 4, *[None] * 6]


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: S.CosineAnnealingLR(o, 10),
        lambda o: S.ExponentialLR(o, 0.8),
        lambda o: S.MultiStepLR(o, [40]),
        lambda o: S.ConstantLR(o, 1.0),
    ],
)
def test_no_drop_no_wait(scheduler: Any) -> None:
    assert reasons(scheduler) == [None] * 10


def test_warm_up() -> None:
    told = reasons(lambda o: S.LinearLR(o, 0.1, total_iters=4))
    assert told == [*["the learning rate still rises"] * 4, *[None] * 6]


def test_plateau_is_waited_for_while_it_can_still_lower_the_rate() -> None:
    # The metric stays equal, so the rate falls every third epoch: 0.1, 0.01, 0.001 and no more.
    told = reasons(lambda o: S.ReduceLROnPlateau(o, patience=2, min_lr=1e-3))
    known = [reason is not None for reason in told]
    assert known == sorted(known, reverse=True)
    assert told[0] == "ReduceLROnPlateau may still lower the learning rate"
    assert known.count(True) == 7


def lowers(**options: Any) -> tuple[list[bool], list[float]]:
    """Whether a plateau was waited for after each epoch, and the rate of each batch."""
    rates: list[float] = []

    class Rates(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            rates.append(rates_now(trainer)[0])

    plateau = {k: options.pop(k) for k in ("patience", "cooldown") if k in options}
    make = lambda o: S.ReduceLROnPlateau(o, min_lr=0.01, **plateau)  # noqa: E731
    known = [reason is not None for reason in reasons(make, Rates(), strict=False, **options)]
    return known, rates


# No metric before the first validation.
@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric:RuntimeWarning")
@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize("patience", [0, 1, 2, 3, 4, 7, 8, 9, 20, 27, 28, 29, 50])
def test_a_plateau_is_waited_for_as_long_as_its_patience_fits(
    patience: int, frequency: int, interval: str
) -> None:
    known, rates = lowers(patience=patience, frequency=frequency, interval=interval)
    # The metric never gets better, so what is foreseen is what comes.
    # The first epoch that begins with it; to end with it is no use.
    dropped = next((math.ceil(i / BATCHES) for i, rate in enumerate(rates) if rate < 0.1), 0)
    assert known == [*(epoch < dropped for epoch in range(9)), False]


def test_a_plateau_scheduler_that_is_done_is_not_waited_for() -> None:
    assert reasons(lambda o: S.ReduceLROnPlateau(o, min_lr=0.1)) == [None] * 10


def test_schedulers_are_copied_once_as_long_as_they_do_what_was_foreseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = []
    ahead = rates_ahead
    monkeypatch.setattr(
        "lightning_ext._schedule.rates_ahead", lambda *args: times.append(args) or ahead(*args)
    )
    reasons(lambda o: S.CosineAnnealingLR(o, 10))
    assert len(times) == 1
