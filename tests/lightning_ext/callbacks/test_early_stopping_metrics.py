"""What is an evaluation, with which values and which budget it comes to the rule."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.lightning_ext.curves import (
    BATCHES,
    NEVER,
    Asked,
    Follows,
    actions,
    asked,
    drops_at,
    falling,
    flat,
    follow,
    sgd,
    stopping,
)
from tests.lightning_ext.helpers import Module, ValidatedModule, loader, trainer

__all__ = ["asked"]


# Options of the trainer, steps at which it evaluates, budget, and what stopping then saves.
INTERVALS: dict[str, Any] = {
    "each epoch": ({}, range(6, 73, 6), 12, "10 epochs"),
    "every third epoch": ({"check_val_every_n_epoch": 3}, range(18, 73, 18), 4, "6 epochs"),
    "every fifth epoch": ({"check_val_every_n_epoch": 5}, (30, 60), 2, "2 epochs"),
    "twice an epoch": ({"val_check_interval": 0.5}, range(3, 73, 3), 24, "66 steps"),
    "every 2 batches": ({"val_check_interval": 2}, range(2, 73, 2), 36, "68 steps"),
    "every batch": ({"val_check_interval": 1}, range(1, 73), 72, "70 steps"),
    "every 8 batches": (
        {"val_check_interval": 8, "check_val_every_n_epoch": None},
        range(8, 73, 8),
        9,
        "56 steps",
    ),
    "max_steps": ({"max_epochs": -1, "max_steps": 48}, range(6, 49, 6), 8, "6 epochs"),
    "whichever comes first": ({"max_steps": 48}, range(6, 49, 6), 8, "6 epochs"),
    "steps within epochs": (
        {"max_epochs": -1, "max_steps": 40, "val_check_interval": 2},
        range(2, 41, 2),
        20,
        "36 steps",
    ),
    "accumulating": ({"accumulate_grad_batches": 3}, range(2, 25, 2), 12, "10 epochs"),
}


@pytest.mark.parametrize("name", INTERVALS)
def test_each_validation_is_one_evaluation(name: str, asked: list[Asked]) -> None:
    options, steps, budget, left = INTERVALS[name]
    follow(stopping(**NEVER), module=Follows(falling), **{"max_epochs": 12, **options})
    assert [a.value for a in asked] == [falling(step) for step in steps]
    assert {a.budget for a in asked} == {budget}
    assert asked[1].left == left


def test_no_limit_no_budget(asked: list[Asked]) -> None:
    class Ends(Follows):
        def on_train_epoch_end(self) -> None:
            self.trainer.should_stop = self.trainer.current_epoch == 5

    follow(stopping(**NEVER), module=Ends(falling), max_epochs=-1)
    assert {(a.budget, a.left) for a in asked} == {(None, None)}


def test_time_is_a_budget(asked: list[Asked]) -> None:
    follow(stopping(**NEVER), module=Follows(falling), max_epochs=-1, max_time=timedelta(seconds=3))
    budgets = [a.budget for a in asked if a.budget is not None]
    assert budgets[len(asked) // 2] == pytest.approx(len(asked), rel=0.5)


@pytest.mark.parametrize("every", [1, None])
def test_validation_by_the_clock(every: int | None, asked: list[Asked]) -> None:
    interval = timedelta(seconds=0.02)
    options = {"val_check_interval": interval, "check_val_every_n_epoch": every}
    follow(stopping(**NEVER), module=Follows(falling), max_epochs=20, **options)
    assert asked


class Vector(Follows):
    """A manual optimization that returns what it likes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().step()
        return torch.ones(3)


def test_a_loss_that_is_no_number_is_none(asked: list[Asked]) -> None:
    follow(stopping(**NEVER), module=Vector(falling), max_epochs=3)
    assert [math.isnan(a.train_value) for a in asked] == [True] * 3


def test_train_value_is_the_mean_loss_since_the_last_evaluation(asked: list[Asked]) -> None:
    options = {"max_epochs": 2, "val_check_interval": 3, "accumulate_grad_batches": 3}
    follow(stopping(), module=Follows(falling), **options)
    assert [a.train_value for a in asked] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def test_train_monitor(asked: list[Asked]) -> None:
    follow(stopping(train_monitor="other"), module=Follows(falling), max_epochs=2)
    assert [a.train_value for a in asked] == [1.0, 1.0]


class AtTheEnd(Follows):
    """Logs the training loss as late as when an epoch ends."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mean", 2.0, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("interval", [1.0, 0.5])
def test_train_monitor_of_the_epoch(interval: float, asked: list[Asked]) -> None:
    callback = stopping(train_monitor="mean")
    follow(callback, module=AtTheEnd(falling), max_epochs=3, val_check_interval=interval)
    known = [not math.isnan(a.train_value) for a in asked]
    assert known == ([True] * 3 if interval == 1.0 else [False, False, True, True, True, True])


@pytest.mark.parametrize(("interval", "evaluations"), [(1.0, 0), (0.5, 2)])
def test_unknown_train_monitor(interval: float, evaluations: int, asked: list[Asked]) -> None:
    message = r"train_monitor='los' is not logged; pass one of .*'loss'.* self.log in training_step"
    with pytest.raises(ValueError, match=message):
        trainer(stopping(train_monitor="los"), max_epochs=3, val_check_interval=interval).fit(
            ValidatedModule(sgd), loader(), loader()
        )
    assert len(asked) == evaluations


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 0.5}, {"limit_val_batches": 0}])
def test_metric_of_the_training_epoch(options: Any, asked: list[Asked]) -> None:
    module = Follows(falling, where="train_epoch_end")
    follow(stopping(**NEVER), module=module, max_epochs=4, **options)
    assert [a.value for a in asked] == [falling(step) for step in (6, 12, 18, 24)]
    assert asked[1].left == "2 epochs"


def test_metric_of_the_training_step(asked: list[Asked]) -> None:
    trainer(stopping(monitor="loss"), max_epochs=3).fit(Module(sgd), loader())
    assert len(asked) == 3


def test_unknown_metric_is_an_error_before_more_is_trained() -> None:
    t = trainer(stopping(monitor="val_los", mode="min"))
    message = (
        r"monitor='val_los' is not logged; pass one of .*'val_loss'.*, or log it with self.log"
    )
    with pytest.raises(ValueError, match=message):
        t.fit(Follows(), loader(), loader())
    assert t.global_step == BATCHES
    t = trainer(
        stopping(monitor="val_los", mode="min"), val_check_interval=2, check_val_every_n_epoch=None
    )
    with pytest.raises(ValueError, match=message):
        t.fit(Follows(), loader(), loader())
    assert t.global_step == 2


@pytest.mark.parametrize("where", ["validation", "train_epoch_end"])
@pytest.mark.parametrize("interval", [1.0, 0.5])
def test_metric_of_every_fifth_time(interval: float, where: str, asked: list[Asked]) -> None:
    apart = 15 if where == "validation" and interval < 1 else 30
    first = 6 if apart == 30 else 3
    module = Follows(lambda step: falling(step) if step % apart == first else None, where=where)
    with pytest.warns(UserWarning, match=f"'val_loss' is not logged in every {where[:5]}") as seen:
        t = follow(stopping(**NEVER), module=module, max_epochs=31, val_check_interval=interval)
    assert len([w for w in seen if "val_loss" in str(w.message)]) == 1
    assert t.current_epoch == 31
    steps = range(first, 31 * BATCHES + 1, apart)
    assert [a.value for a in asked] == [falling(step) for step in steps]
    assert {a.budget for a in asked[1:]} == {len(steps)}
    # All the training since the evaluation before.
    since = range(first, first + apart)
    assert asked[1].train_value == pytest.approx(sum(1 / (1 + step) for step in since) / apart)


def test_waits_for_a_drop_between_the_evaluations_to_come() -> None:
    module = Follows(lambda step: flat(step) if step % 12 == 6 else None, drops_at(54))
    callback = stopping(min_improvement=1.0)
    with pytest.warns(UserWarning, match="is not logged in every validation"):
        t = follow(callback, module=module, max_epochs=60)
    assert actions(callback) == ["hold", "stop"]
    assert t.current_epoch == 57


def test_metric_of_several_numbers() -> None:
    class Odd(Follows):
        def on_validation_epoch_end(self) -> None:
            self.trainer.callback_metrics["val_loss"] = torch.ones(3)

    with pytest.raises(ValueError, match=r"'val_loss' has shape \(3,\); log a single number"):
        follow(stopping(), module=Odd(lambda step: None))


def test_a_run_of_nan_has_its_own_reason() -> None:
    callback = stopping()
    t = follow(callback, module=Follows(lambda step: math.nan if step > 30 else falling(step)))
    assert t.current_epoch == 8
    assert "not finite" in str(callback.reason_)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Of a length that only its end tells."""

    def __iter__(self) -> Any:
        return iter([(torch.zeros(8, 6), torch.zeros(8, dtype=torch.long))] * BATCHES)


def test_epochs_of_unknown_length(asked: list[Asked]) -> None:
    t = trainer(stopping(**NEVER), max_epochs=5, val_check_interval=2, check_val_every_n_epoch=None)
    train = torch.utils.data.DataLoader(Stream(), batch_size=None)
    t.fit(Follows(falling), train, loader())
    assert [a.budget for a in asked][3:] == [15] * 12
