"""PredictiveEarlyStopping asks the rule about each evaluation, and does what it says."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch.optim import lr_scheduler as S

from lightning_ext import PredictiveEarlyStopping
from strategies.early_stopping import PredictiveStopping
from strategies.early_stopping.forecast import View
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
    scheduled,
    stopping,
)
from tests.lightning_ext.helpers import weights

__all__ = ["asked"]


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


@pytest.mark.parametrize("options", [{"min_epochs": 12}, {"min_steps": 72}])
def test_a_diverged_run_is_held_by_the_user_alone(options: Any) -> None:
    curve = lambda step: math.nan if step > 30 else falling(step)  # noqa: E731
    callback = stopping()
    t = follow(callback, module=Follows(curve, drops_at(27)), **options)
    assert t.current_epoch == 12
    told = [(d.step, d.action) for d in callback.decisions_ if d.action != "fall back"]
    assert told == [(48, "hold"), (72, "stop")]
    assert "not finite; stopping saves 18 epochs" in callback.decisions_[-1].reason


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


def test_waits_for_a_drop_of_the_learning_rate() -> None:
    drops = drops_at(27)
    smooth = scheduled(lambda o: S.CosineAnnealingLR(o, 30))
    waiting, hasty = stopping(), stopping(wait_for_schedule=False)
    assert follow(waiting, module=Follows(make=drops)).current_epoch == 28
    assert actions(waiting) == ["hold", "stop"]
    assert "held, as the learning rate is still to drop" in waiting.decisions_[0].reason
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


@pytest.mark.parametrize("averages", [EMAWeightAveraging(), StochasticWeightAveraging(0.1)])
def test_restore_best_beside_averaged_weights_is_refused(averages: Any) -> None:
    advice = rf"{type(averages).__name__} puts averages .* add ModelCheckpoint\(monitor='val_loss'"
    with pytest.raises(ValueError, match=advice):
        follow(averages, stopping(restore_best=True))
    follow(averages, stopping(), max_epochs=2)


@pytest.mark.parametrize("options", [{"val_check_interval": 2}, {"accumulate_grad_batches": 4}])
def test_forecast_is_logged_at_the_step_of_the_metric(options: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    callback = stopping(log_forecast=True, **NEVER)
    options = {"val_check_interval": 3, "max_epochs": 6, "log_every_n_steps": 1, **options}
    follow(callback, module=Follows(falling), logger=logger, **options)
    logger.save()
    table = pd.read_csv(tmp_path / "lightning_logs/version_0/metrics.csv")
    steps = [list(table.dropna(subset=f"val_loss{n}")["step"]) for n in ("", "_p_improve")]
    assert steps[0][2:] == steps[1]


def test_forecast_is_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    callback = stopping(log_forecast=True, **NEVER)
    follow(callback, logger=logger, max_epochs=6, log_every_n_steps=1)
    logger.save()
    table = pd.read_csv(tmp_path / "lightning_logs/version_0/metrics.csv")
    rows = table.dropna(subset="val_loss_p_improve")
    assert list(rows["epoch"]) == [2, 3, 4, 5]
    assert list(rows["step"]) == [17, 23, 29, 35]
    assert list(table.dropna(subset="val_loss")["step"])[2:] == list(rows["step"])
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


def test_what_others_read_of_lightnings_own() -> None:
    callback = stopping(mode="auto")
    assert (callback.best_score, callback.wait_count, callback.min_delta) == (math.inf, 0, 0.0)
    follow(callback, module=Follows(lambda step: abs(step - 18.0)), max_epochs=5)
    assert (callback.best_score, callback.wait_count, callback.stopped_epoch) == (0.0, 2, 0)
    assert callback.monitor_op(callback.best_score, torch.tensor(1.0))
    assert stopping(mode="max").best_score == -math.inf


def test_beside_one_with_a_target_each_keeps_its_state(tmp_path: Path) -> None:
    both = [stopping(), stopping(target=0.1), stopping(horizon=3), stopping(min_improvement=0.0)]
    assert len({callback.state_key for callback in both}) == 4
    t = follow(*both, max_epochs=2)
    t.save_checkpoint(path := tmp_path / "two.ckpt")
    assert {c.state_key for c in both} <= set(torch.load(path, weights_only=True)["callbacks"])


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
