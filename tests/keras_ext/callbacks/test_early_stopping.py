"""PredictiveEarlyStopping: it decides as the rule does, and says so where Keras users look."""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_ext import PredictiveEarlyStopping
from strategies.early_stopping import PredictiveStopping
from tests.keras_ext.callbacks.curves import (
    FALLING,
    FLAT,
    NEVER,
    Shows,
    compiled,
    shown,
    without_falls,
)
from tests.keras_ext.helpers import BACKEND, data, fit, warned


def stopped_by_rule(
    values: Sequence[float], train: Sequence[float], budget: int, **options: Any
) -> tuple[int | None, str | None]:
    rule = PredictiveStopping("min", **options)
    for epoch, (value, train_value) in enumerate(zip(values, train, strict=False)):
        decision = rule.update(value, train_value, budget, left=f"{budget - epoch - 1} epochs")
        if decision.stop:
            return epoch, f"epoch {epoch + 1}: {decision.reason}"
    return None, None


class TestDecisions:
    @pytest.mark.filterwarnings("ignore:PredictiveEarlyStopping.*patience:UserWarning")
    @pytest.mark.parametrize("values", [FALLING, FLAT, FALLING[::-1]], ids=["falls", "flat", "up"])
    @pytest.mark.parametrize(
        "options",
        [{"preset": "fast"}, {"min_improvement": 0.05}, {"target": 0.001}, {"horizon": 2}],
        ids=str,
    )
    def test_as_the_rule(self, values: list[float], options: dict[str, Any]) -> None:
        stopping = PredictiveEarlyStopping("val_loss", **options)
        history = shown(values, stopping).history
        expected = stopped_by_rule(values, history["loss"], len(values), **options)
        assert (stopping.stopped_epoch_, stopping.reason_) == expected
        ran = len(values) if expected[0] is None else expected[0] + 1
        assert len(history["loss"]) == ran

    @pytest.mark.usefixtures("eager")
    def test_what_is_recorded(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss")
        history = shown(FALLING, stopping)
        (decision,) = without_falls(stopping)
        forecast = stopping.forecast_
        assert forecast is not None
        assert len(history.epoch) == 3
        assert (decision.action, decision.step) == ("stop", 6)
        assert decision.reason.startswith("epoch 3: ")
        assert decision.reason.endswith("; stopping saves 27 epochs")
        assert decision.reason == stopping.reason_
        assert dict(decision.numbers) == {
            "epoch": 2,
            "saved": 27,
            "p_improve": forecast.p_improve,
            "expected_improvement": forecast.expected_improvement,
        }

    @pytest.mark.usefixtures("eager")
    def test_one_epoch_is_not_several(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss")
        shown(FALLING[:4], stopping)
        assert str(stopping.reason_).endswith("stopping saves 1 epoch")

    @pytest.mark.usefixtures("eager")
    def test_nothing_to_save_after_the_last_epoch(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss")
        shown(FALLING[:3], stopping)
        assert stopping.stopped_epoch_ is None
        assert not without_falls(stopping)

    def test_higher_is_better(self) -> None:
        values = [1 - v for v in FLAT]
        low = PredictiveEarlyStopping("val_loss", preset="fast")
        high = PredictiveEarlyStopping("val_accuracy", preset="fast")
        shown(FLAT, low)
        shown(values, high)
        assert high.stopped_epoch_ == low.stopped_epoch_
        assert high.best_ == max(values[: len(values)])
        assert low.best_epoch_ == high.best_epoch_ == 3

    def test_the_training_loss_can_be_another_metric(self) -> None:
        class Spied(PredictiveEarlyStopping):
            @property
            def seen(self) -> list[float]:
                return list(self._rule.train_values)

        for name, expected in ((None, "loss"), ("other", "other")):
            stopping = Spied("val_loss", train_monitor=name, **NEVER)
            history = fit(
                compiled(), Shows([3.0, 2.0], "other"), Shows(FLAT), stopping, epochs=2
            ).history
            assert stopping.seen == history[expected]
        stopping = Spied("loss", **NEVER)
        fit(compiled(), stopping, epochs=2)
        assert np.isnan(stopping.seen).all()

    def test_a_run_that_is_lost(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss", restore_best=True)
        shown([1.0, 0.5] + [math.nan] * 8, stopping)
        assert stopping.stopped_epoch_ == 4
        assert stopping.reason_ == (
            "epoch 5: 3 evaluations in a row were not finite; stopping saves 5 epochs"
        )
        assert (stopping.best_, stopping.best_epoch_) == (0.5, 1)

    def test_a_run_that_finds_itself_after_a_start_without_numbers(self) -> None:
        values = [math.inf] * 3 + FALLING
        stopping = PredictiveEarlyStopping("val_loss", start_from_epoch=10, **NEVER)
        assert len(shown(values, stopping, epochs=12).epoch) == 12
        (held,) = without_falls(stopping)
        assert held.reason.endswith("saves 9 epochs; held, as start_from_epoch is 10")
        lost = PredictiveEarlyStopping("val_loss", start_from_epoch=10, **NEVER)
        shown([math.inf] * 20, lost)
        assert lost.stopped_epoch_ == 10

    def test_no_schedule_holds_a_run_that_is_lost(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss")
        drop = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 if epoch < 8 else 0.01)
        shown([math.nan] * 10, stopping, drop)
        assert stopping.stopped_epoch_ == 2

    def test_a_metric_that_does_not_change(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss", min_improvement=0.0, patience=4)
        shown([0.5] * 20, stopping)
        assert "the metric has not changed in 4 evaluations" in str(stopping.reason_)

    def test_a_strange_curve_is_left_to_patience_and_says_so(self) -> None:
        strange = [float(10 ** (9 * (k % 2)) * (-1) ** k) for k in range(30)]
        stopping = PredictiveEarlyStopping("val_loss", patience=4)
        in_distribution = []

        class Watches(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                if stopping.forecast_ is not None:
                    in_distribution.append(stopping.forecast_.in_distribution)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(compiled(), Shows(strange), stopping, Watches(), epochs=30)
        told = [d.action for d in stopping.decisions_]
        assert told.count("fall back") == int(not all(in_distribution))
        by_patience = "patience" in str(stopping.reason_)
        assert by_patience == any("choose patience to suit" in str(w.message) for w in caught)

    def test_stop_training_is_only_ever_set(self) -> None:
        class StopsAtOnce(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.model.stop_training = True

        stopping = PredictiveEarlyStopping("loss", **NEVER)
        assert len(fit(compiled(), StopsAtOnce(), stopping).epoch) == 1
        assert stopping.stopped_epoch_ is None


class TestStart:
    @pytest.mark.usefixtures("eager")
    def test_waits_without_latching(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss", start_from_epoch=6)
        shown(FALLING, stopping)
        assert stopping.stopped_epoch_ == 6
        held, stop = without_falls(stopping)
        assert (held.action, stop.action) == ("hold", "stop")
        assert held.reason.startswith("epoch 3: ")
        assert held.reason.endswith("held, as start_from_epoch is 6")
        assert len(stopping._rule.values) == 7

    def test_a_reason_to_stop_that_goes_away(self) -> None:
        values = [1.0] * 5 + [0.9**k for k in range(5, 20)]
        stopping = PredictiveEarlyStopping("val_loss", start_from_epoch=5, target=0.95)
        shown(values, stopping, epochs=7)
        assert stopping.stopped_epoch_ is None


class TestEvaluations:
    @pytest.mark.usefixtures("eager")
    @pytest.mark.parametrize("freq", [1, 2, 3])
    def test_an_epoch_without_validation_is_none(self, freq: int) -> None:
        x, y = data()
        stopping = PredictiveEarlyStopping("val_loss")
        history = fit(
            compiled(), stopping, epochs=30, validation_data=(x, y), validation_freq=freq
        ).history
        assert stopping.stopped_epoch_ == 3 * freq - 1
        assert list(stopping._rule.values) == history["val_loss"]
        assert list(stopping._rule.train_values) == history["loss"][freq - 1 :: freq]
        assert stopping._evaluations.planned(30) == 30 // freq

    @pytest.mark.usefixtures("eager")
    def test_nothing_to_save_after_the_last_validation(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss")
        fit(compiled(), stopping, epochs=11, validation_data=data(), validation_freq=3)
        assert stopping.stopped_epoch_ is None or stopping.stopped_epoch_ < 9

    def test_all_there_is_is_named(self) -> None:
        stopping = PredictiveEarlyStopping("val_accuracy")
        with pytest.raises(ValueError, match=r"monitor='val_accuracy'.* hold: loss, val_loss; pas"):
            fit(compiled(), stopping, validation_data=data())
        with pytest.raises(ValueError, match=r"monitor='auc' is not in the logs, which hold: loss"):
            fit(compiled(), PredictiveEarlyStopping("auc"))
        stopping = PredictiveEarlyStopping("loss", train_monitor="los")
        with pytest.raises(ValueError, match=r"train_monitor='los' .* hold: loss; pass"):
            fit(compiled(), stopping)

    def test_no_validation_at_all(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss")
        with warned(
            "10 epochs without 'val_loss' in the logs, which hold: loss; pass validation_d"
        ):
            history = fit(compiled(), stopping, epochs=12)
        assert len(history.epoch) == 12

    def test_more_than_one_number(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss")
        with pytest.raises(TypeError, match=r"monitor='val_loss' must be one number, got array"):
            shown([np.ones(2)], stopping)  # type: ignore[list-item]

    def test_a_number_in_an_array(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss")
        shown([np.ones((1,)), keras.ops.ones(())], stopping)
        assert list(stopping._rule.values) == [1.0, 1.0]

    @pytest.mark.skipif(BACKEND == "torch", reason="it makes one step at a time only")
    @pytest.mark.usefixtures("eager")
    def test_steps_per_execution(self) -> None:
        stopping, model = PredictiveEarlyStopping("loss"), compiled(steps_per_execution=2)
        assert len(fit(model, stopping, epochs=9).epoch) == 3
        assert without_falls(stopping)[0].step == 6

    @pytest.mark.usefixtures("eager")
    def test_in_a_loop_of_the_user_s_own(self) -> None:
        stopping, model = PredictiveEarlyStopping("val_loss"), compiled()
        several = keras.callbacks.CallbackList([stopping], model=model)
        model.stop_training = False
        several.on_train_begin()
        for epoch, value in enumerate(FALLING):
            several.on_epoch_begin(epoch)
            several.on_epoch_end(epoch, {"val_loss": value})
            if model.stop_training:
                break
        several.on_train_end()
        assert stopping.stopped_epoch_ == 2
        assert "saves" not in str(stopping.reason_)


class TestLogs:
    def test_forecasts_are_in_the_history_and_in_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "log.csv"
        stopping = PredictiveEarlyStopping("val_loss", log_forecast=True, **NEVER)
        model, logger = compiled(), keras.callbacks.CSVLogger(str(path))
        history = fit(model, stopping, logger, epochs=5, validation_data=data()).history
        with path.open() as file:
            rows = list(csv.DictReader(file))
        for name in ("val_loss_p_improve", "val_loss_expected_best"):
            values = history[name]
            assert [math.isnan(v) for v in values] == [True, True, False, False, False]
            assert all(type(v) is float for v in values)
            np.testing.assert_array_equal([float(row[name]) for row in rows], values)
        assert stopping.forecast_ is not None
        assert history["val_loss_p_improve"][-1] == stopping.forecast_.p_improve

    def test_one_forecast_for_each_evaluation(self, tmp_path: Path) -> None:
        """CSVLogger takes its columns from the first epoch, where no name may begin with val_."""
        path = tmp_path / "log.csv"
        stopping = PredictiveEarlyStopping("val_loss", log_forecast=True, **NEVER)
        logger = keras.callbacks.CSVLogger(str(path))
        options = {"epochs": 6, "validation_data": data(), "validation_freq": 2}
        history = fit(compiled(), stopping, logger, **options).history
        assert len(history["val_loss_p_improve"]) == len(history["val_loss"]) == 3
        with path.open() as file:
            assert [row["val_loss"] != "NA" for row in csv.DictReader(file)] == [False, True] * 3

    def test_off_by_default(self) -> None:
        history = shown(FALLING[:4], PredictiveEarlyStopping("val_loss", **NEVER)).history
        assert set(history) == {"loss", "val_loss"}

    @pytest.mark.parametrize(("verbose", "in_fit"), [(True, 2), (False, 2), (True, 0)])
    def test_says_why_unless_silent(
        self, eager: None, verbose: bool, in_fit: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stopping = PredictiveEarlyStopping("val_loss", verbose=verbose)
        shown(FALLING, stopping, verbose=in_fit)
        said = f"Early stopping at {stopping.reason_}\n" in capsys.readouterr().out
        assert said == (verbose and in_fit > 0)


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"monitor": 1}, TypeError, "monitor must be the name of a metric.*got 1"),
            ({"monitor": "val_x"}, ValueError, "cannot tell.*'val_x'.*pass mode='min'"),
            ({"mode": "low"}, ValueError, "mode must be.*got 'low'"),
            ({"preset": "slow"}, ValueError, "preset must be one of.*got 'slow'"),
            ({"min_improvement": 2.0}, ValueError, "min_improvement must be between 0 and 1"),
            ({"horizon": 0}, ValueError, "horizon must be at least 1, got 0"),
            ({"target": "low"}, TypeError, "target must be a number, got 'low'"),
            ({"p_target": 5}, ValueError, "p_target must be between 0 and 1, got 5"),
            ({"patience": 1.5}, TypeError, "patience must be a whole number, got 1.5"),
            ({"train_monitor": 3}, TypeError, "train_monitor must be the name.*got 3"),
            ({"start_from_epoch": -1}, ValueError, "start_from_epoch must be 0 or more, got -1"),
            ({"start_from_epoch": 0.5}, TypeError, "start_from_epoch must be a whole number"),
            ({"restore_best": "yes"}, TypeError, "restore_best must be True or False, got 'yes'"),
            ({"state_path": 5}, TypeError, "state_path must be the path of a file or None, got 5"),
            ({"monitor": ""}, TypeError, "monitor must be the name of a metric"),
        ],
    )
    def test_what_is_wrong_with_them(
        self, options: dict[str, Any], error: type[Exception], text: str
    ) -> None:
        with pytest.raises(error, match=text):
            PredictiveEarlyStopping(**{"monitor": "val_loss", **options})

    def test_kept_for_the_configuration(self, tmp_path: Path) -> None:
        stopping = PredictiveEarlyStopping("val_iou", target=0.9, state_path=tmp_path / "x.json")
        config = stopping.get_config()
        assert (config["mode"], config["state_path"]) == ("auto", str(tmp_path / "x.json"))
        again = PredictiveEarlyStopping.from_config(config)
        assert repr(again) == (
            f"PredictiveEarlyStopping(monitor='val_iou', target=0.9, "
            f"state_path={str(tmp_path / 'x.json')!r})"
        )

    def test_the_same_object_twice(self) -> None:
        stopping = PredictiveEarlyStopping("loss")
        with pytest.raises(ValueError, match="twice; pass it once"):
            fit(compiled(), stopping, stopping)

    @pytest.mark.usefixtures("eager")
    def test_two_of_them_in_one_fit(self) -> None:
        eager = PredictiveEarlyStopping("val_loss", start_from_epoch=4)
        calm = PredictiveEarlyStopping("loss", start_from_epoch=9)
        fit(compiled(), Shows(FALLING), calm, eager, epochs=9)
        assert (eager.stopped_epoch_, calm.stopped_epoch_) == (4, None)
        assert len(calm._rule.values) == 5


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX keeps the state outside of the model")
@pytest.mark.parametrize("first", [True, False])
def test_state_stays_with_jax_during_an_epoch(first: bool) -> None:
    """Looking at `self.model` between two steps would move all state at each of them."""

    class CountsSyncs(keras.Sequential):
        synced = 0

        def jax_state_sync(self) -> None:
            type(self).synced += not self._jax_state_synced
            super().jax_state_sync()

    counted = []
    stopping = PredictiveEarlyStopping("val_loss", restore_best=True, log_forecast=True, **NEVER)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate)
    for callbacks in ([scheduler], [stopping, scheduler] if first else [scheduler, stopping]):
        CountsSyncs.synced = 0
        model = CountsSyncs([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        fit(model, *callbacks, batch_size=2, validation_data=data())
        counted.append(CountsSyncs.synced)
    assert counted[0] == counted[1]
