"""PredictiveEarlyStopping asks the rule about each evaluation, and does what it says."""

from __future__ import annotations

import copy
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.optim import lr_scheduler as S

from lightning_ext import PredictiveEarlyStopping
from strategies.early_stopping import PredictiveStopping
from strategies.early_stopping.forecast import View
from tests.lightning_ext.curves import (
    BATCHES,
    Asked,
    Follows,
    asked,
    falling,
    flat,
    follow,
    sgd,
    stopping,
)
from tests.lightning_ext.helpers import Module, loader, trainer, weights

__all__ = ["asked"]

NEVER: dict[str, Any] = {"min_improvement": 0.0}  # some improvement is always expected


def actions(callback: PredictiveEarlyStopping) -> list[str]:
    return [decision.action for decision in callback.decisions_]


def test_decides_as_the_rule_does() -> None:
    callback = PredictiveEarlyStopping("val_loss", preset="fast")
    t = follow(callback)
    rule = PredictiveStopping("min", preset="fast")
    for epoch in range(30):
        steps = range(epoch * BATCHES, (epoch + 1) * BATCHES)
        train = sum(1 / (1 + step) for step in steps) / BATCHES
        value = flat((epoch + 1) * BATCHES)
        decision = rule.update(value, train, 30, left=f"{29 - epoch} epochs")
        if decision.stop:
            break
    assert t.current_epoch == epoch + 1
    state = callback.state_dict()["rule"]
    assert state["values"] == pytest.approx(rule.values, rel=1e-12)
    assert state["train_values"] == pytest.approx(rule.train_values, rel=1e-6)
    if decision.stop:
        assert callback.stopped_epoch_ == epoch
        assert callback.reason_ == f"epoch {epoch + 1}: {decision.reason}"
        assert callback.decisions_[-1].numbers["saved"] == 29 - epoch


def test_stops_a_curve_that_is_done_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    callback = stopping()
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        t = follow(callback)
    assert t.current_epoch < 25
    assert actions(callback) == ["stop"]
    stopped = callback.decisions_[0]
    assert callback.stopped_epoch_ == t.current_epoch - 1 == stopped.numbers["epoch"]
    assert stopped.reason.startswith(f"epoch {t.current_epoch}: ")
    assert stopped.reason.endswith(f"; stopping saves {30 - t.current_epoch} epochs")
    assert callback.reason_ == stopped.reason
    assert f"PredictiveEarlyStopping: {stopped.reason}" in caplog.text
    assert callback.best_ == pytest.approx(flat(t.global_step), rel=1e-12)
    assert callback.best_epoch_ == callback.stopped_epoch_
    assert callback.forecast_ is not None
    assert callback.forecast_.p_improve == stopped.numbers["p_improve"]


def test_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        follow(stopping(verbose=False))
    assert "PredictiveEarlyStopping" not in caplog.text


def test_does_not_stop_a_curve_that_improves() -> None:
    callback = stopping(**NEVER)
    assert follow(callback, module=Follows(falling), max_epochs=12).current_epoch == 12
    assert callback.stopped_epoch_ is callback.reason_ is None
    assert "stop" not in actions(callback)


# Options of the trainer, steps at which it evaluates, budget, and what stopping then saves.
INTERVALS: dict[str, Any] = {
    "each epoch": ({}, range(6, 73, 6), 12, "10 epochs"),
    "every third epoch": ({"check_val_every_n_epoch": 3}, range(18, 73, 18), 4, "6 epochs"),
    "every fifth epoch": ({"check_val_every_n_epoch": 5}, (30, 60), 2, "2 epochs"),
    "twice an epoch": ({"val_check_interval": 0.5}, range(3, 73, 3), 24, "66 steps"),
    "every 2 batches": ({"val_check_interval": 2}, range(2, 73, 2), 36, "68 steps"),
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


def test_train_value_is_the_mean_loss_since_the_last_evaluation(asked: list[Asked]) -> None:
    options = {"max_epochs": 2, "val_check_interval": 3, "accumulate_grad_batches": 3}
    follow(stopping(), module=Follows(falling), **options)
    assert [a.train_value for a in asked] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def test_train_monitor(asked: list[Asked]) -> None:
    follow(stopping(train_monitor="other"), module=Follows(falling), max_epochs=2)
    follow(stopping(train_monitor="unknown"), module=Follows(falling), max_epochs=1)
    assert [a.train_value for a in asked][:2] == [1.0, 1.0]
    assert math.isnan(asked[2].train_value)


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


def test_metric_missing_at_times(asked: list[Asked]) -> None:
    module = Follows(lambda step: None if step % 12 == 0 else falling(step))
    with pytest.warns(UserWarning, match="'val_loss' is not logged in every validation") as caught:
        follow(stopping(**NEVER), module=module, max_epochs=6)
    assert len([w for w in caught if "val_loss" in str(w.message)]) == 1
    assert [math.isnan(a.value) for a in asked] == [False, True] * 3


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


@pytest.mark.parametrize(
    ("options", "earliest", "why"),
    [
        ({"min_epochs": 27}, 27, "min_epochs is 27"),
        ({"min_steps": 27 * BATCHES}, 27, f"min_steps is {27 * BATCHES}"),
        ({"start_from_epoch": 26}, 27, "start_from_epoch is 26"),
    ],
)
@pytest.mark.parametrize("interval", [1.0, 0.5])
def test_holds(options: dict[str, Any], earliest: int, why: str, interval: float) -> None:
    ours = {k: v for k, v in options.items() if k == "start_from_epoch"}
    callback = stopping(**ours)
    theirs = {k: v for k, v in options.items() if k not in ours}
    t = follow(callback, val_check_interval=interval, **theirs)
    # With two validations in an epoch, the first from which it may stop is inside of the next.
    due = earliest * BATCHES - (BATCHES // 2 if ours and interval < 1 else 0)
    assert t.global_step == due
    assert actions(callback) == ["hold", "stop"]
    assert callback.decisions_[0].reason.endswith(f"; held, as {why}")


def scheduled(scheduler: Any) -> Any:
    def make(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [scheduler(optimizer)]

    return make


def test_waits_for_a_drop_of_the_learning_rate() -> None:
    drops = scheduled(lambda o: S.MultiStepLR(o, [27]))
    smooth = scheduled(lambda o: S.CosineAnnealingLR(o, 30))
    waiting, hasty = stopping(), stopping(wait_for_schedule=False)
    assert follow(waiting, module=Follows(make=drops)).current_epoch == 28
    assert actions(waiting) == ["hold", "stop"]
    assert "held, as the learning rate drops in" in waiting.decisions_[0].reason
    usual = follow(stopping()).current_epoch
    assert follow(hasty, module=Follows(make=drops)).current_epoch == usual < 27
    assert follow(stopping(), module=Follows(make=smooth)).current_epoch == usual


def test_target() -> None:
    callback = stopping(**NEVER, target=0.1)
    t = follow(callback, max_epochs=60)
    assert t.current_epoch < 60
    assert "chance of beating 0.1" in str(callback.reason_)


def test_a_stop_by_patience_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(View, "trusted", property(lambda view: np.zeros(len(view.at), bool)))
    callback = stopping(patience=4)
    with pytest.warns(UserWarning, match="so patience 4 decides.*; choose patience to suit"):
        t = follow(callback, module=Follows(lambda step: abs(step - 18)))
    assert t.current_epoch == 7
    assert actions(callback) == ["fall back", "stop"]
    follow(callback, module=Follows(falling), max_epochs=6)
    assert actions(callback) == ["fall back"]  # no stop, no warning


def test_two_side_by_side() -> None:
    class Two(Follows):
        def on_validation_epoch_end(self) -> None:
            self.log("val_accuracy", float(self.trainer.global_step))

    loss, accuracy = stopping(), stopping(monitor="val_accuracy", **NEVER)
    t = follow(accuracy, loss, module=Two())
    assert loss.stopped_epoch_ == t.current_epoch - 1
    assert accuracy.stopped_epoch_ is None
    assert accuracy.best_ == t.global_step
    assert t.current_epoch == follow(stopping(), module=Two()).current_epoch


@pytest.mark.parametrize("stops", [True, False])
def test_restores_the_best_weights(stops: bool) -> None:
    kept: dict[int, Any] = {}

    class Keeps(Follows):
        def on_validation_end(self) -> None:
            kept[self.trainer.global_step] = weights(self)

    worse_after_18 = lambda step: abs(step - 18) / 18 + 0.1  # noqa: E731
    callback = stopping(restore_best=True, min_improvement=1.0 if stops else 0.0)
    module = Keeps(worse_after_18)
    t = follow(callback, module=module, max_epochs=8)
    assert (t.current_epoch < 8) == stops
    assert (callback.best_, callback.best_epoch_) == (pytest.approx(0.1), 2)
    for name, value in weights(module).items():
        assert torch.equal(value, kept[18][name]), name
    assert callback.decisions_[-1].action == "restore"
    assert callback.decisions_[-1].reason == "epoch 3: its weights are the best"


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_restore_best_of_a_sharded_model_is_refused(name: str) -> None:
    import lightning.pytorch.strategies as strategies

    class Stands:
        strategy = object.__new__(getattr(strategies, name))

    advice = (
        rf"restore_best=True .* {name} .* add ModelCheckpoint\(monitor='val_loss', mode='min'\)"
    )
    with pytest.raises(ValueError, match=advice):
        stopping(restore_best=True).setup(Stands(), Follows(), "fit")  # type: ignore[arg-type]


def test_forecast_is_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    callback = stopping(log_forecast=True, **NEVER)
    follow(callback, logger=logger, max_epochs=6, log_every_n_steps=1)
    logger.save()
    table = pd.read_csv(tmp_path / "lightning_logs/version_0/metrics.csv")
    rows = table.dropna(subset="val_loss_p_improve")
    assert list(rows["epoch"]) == [2, 3, 4, 5]
    assert list(rows["step"]) == [18, 24, 30, 36]
    assert rows["val_loss_p_improve"].between(0, 1).all()
    assert (rows["val_loss_expected_best"] <= callback.state_dict()["rule"]["values"][1]).all()


def test_another_preset_goes_on_with_the_history(tmp_path: Path, asked: list[Asked]) -> None:
    half = follow(stopping(preset="fast"), module=Follows(falling), max_epochs=3)
    half.save_checkpoint(path := str(tmp_path / "half.ckpt"))
    callback = stopping(preset="safe")
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint"):
        follow(callback, module=Follows(falling), max_epochs=6, ckpt=path)
    assert len(callback.state_dict()["rule"]["values"]) == 6
    assert {a.budget for a in asked} == {3, 6}


def test_joins_in_the_middle(tmp_path: Path, asked: list[Asked]) -> None:
    half = follow(module=Follows(falling), max_epochs=6)
    half.save_checkpoint(path := str(tmp_path / "half.ckpt"))
    follow(stopping(), module=Follows(falling), max_epochs=10, ckpt=path)
    assert [a.budget for a in asked] == [4] * 4


def test_more_epochs_on_resume(tmp_path: Path, asked: list[Asked]) -> None:
    half = follow(stopping(**NEVER), module=Follows(falling), max_epochs=4)
    half.save_checkpoint(path := str(tmp_path / "half.ckpt"))
    follow(stopping(**NEVER), module=Follows(falling), max_epochs=8, ckpt=path)
    assert [a.budget for a in asked] == [4] * 4 + [8] * 4


def test_lightnings_own_early_stopping_stays_out_of_it() -> None:
    callback = stopping(patience=3, **NEVER)
    t = follow(callback, module=Follows(lambda step: math.nan if step == 6 else falling(step)))
    assert t.current_epoch == 30
    assert t.early_stopping_callback is callback


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"monitor": ""}, TypeError, "monitor must be the name of a metric, .* got ''"),
        ({"monitor": None}, TypeError, "monitor must be the name"),
        ({"train_monitor": 1}, TypeError, "train_monitor must be the name"),
        ({"monitor": "metric"}, ValueError, "pass mode='min' or mode='max'"),
        ({"mode": "low"}, ValueError, "mode must be 'min', 'max' or 'auto'"),
        ({"preset": "quick"}, ValueError, "preset must be one of safe, balanced, fast"),
        ({"min_improvement": 2.0}, ValueError, "min_improvement must be between 0 and 1"),
        ({"horizon": 0}, ValueError, "horizon must be at least 1"),
        ({"target": "0.1"}, TypeError, "target must be a number"),
        ({"p_target": -1.0}, ValueError, "p_target must be between 0 and 1"),
        ({"patience": 0}, ValueError, "patience must be at least 1"),
        ({"start_from_epoch": -1}, ValueError, "start_from_epoch must be 0 or more"),
        ({"start_from_epoch": 1.5}, TypeError, "start_from_epoch must be a whole number"),
        ({"wait_for_schedule": 1}, TypeError, "wait_for_schedule must be True or False, got 1"),
        ({"restore_best": "yes"}, TypeError, "restore_best must be True or False"),
        ({"log_forecast": 0}, TypeError, "log_forecast must be True or False"),
        ({"verbose": None}, TypeError, "verbose must be True or False"),
    ],
)
def test_bad_arguments(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stopping(**options)


def test_repr_and_copies() -> None:
    callback = stopping(preset="safe")
    shown = "PredictiveEarlyStopping(monitor='val_loss', preset='safe', min_improvement=0.05)"
    assert repr(callback) == repr(copy.deepcopy(callback)) == shown
