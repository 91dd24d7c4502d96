"""PredictiveEarlyStopping waits for what the learning rate is about to do."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
from keras.callbacks import LearningRateScheduler, ReduceLROnPlateau
from keras.optimizers import SGD, schedules

from keras_ext import PredictiveEarlyStopping
from keras_ext._schedule import PLATEAU, RateWatch
from tests.keras_ext.callbacks.curves import (
    FALLING,
    compiled,
    drops_at,
    piecewise,
    shown,
    without_falls,
)
from tests.keras_ext.helpers import STEPS

EPOCHS = 12


@pytest.mark.usefixtures("eager")
class TestHold:
    def stop(self, *callbacks: Any, optimizer: Any = None, **options: Any) -> Any:
        stopping = PredictiveEarlyStopping("val_loss", **options)
        model = compiled(optimizer or SGD(0.1))
        shown(FALLING, stopping, *callbacks, model=model, epochs=EPOCHS)
        return stopping

    @pytest.mark.parametrize("by_callback", [True, False])
    def test_before_a_drop(self, by_callback: bool) -> None:
        if by_callback:
            stopping = self.stop(LearningRateScheduler(drops_at(6)))
        else:
            stopping = self.stop(optimizer=SGD(piecewise(6)))
        held, stop = without_falls(stopping)
        assert held.action == "hold"
        assert held.reason.startswith("epoch 3: ")
        assert held.reason.endswith("; held, as the learning rate is still to drop")
        assert (stop.action, stopping.stopped_epoch_) == ("stop", 6)

    def test_unless_told_not_to(self) -> None:
        stopping = self.stop(LearningRateScheduler(drops_at(6)), wait_for_schedule=False)
        assert stopping.stopped_epoch_ == 2
        assert all(map(math.isnan, stopping._evaluations.rates))

    @pytest.mark.parametrize(
        "schedule",
        [
            schedules.CosineDecay(0.1, EPOCHS * STEPS),
            schedules.ExponentialDecay(0.1, STEPS, 0.8),
            schedules.PolynomialDecay(0.1, EPOCHS * STEPS),
            0.1,
        ],
        ids=["cosine", "exponential", "linear", "number"],
    )
    def test_not_on_the_way_down(self, schedule: Any) -> None:
        assert self.stop(optimizer=SGD(schedule)).stopped_epoch_ == 2

    def test_during_a_warm_up(self) -> None:
        warm = schedules.CosineDecay(0.0, 40, warmup_target=0.1, warmup_steps=5 * STEPS)
        stopping = self.stop(optimizer=SGD(warm))
        assert without_falls(stopping)[0].reason.endswith("held, as the learning rate still rises")
        assert stopping.stopped_epoch_ in (4, 5)

    def test_by_validations(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss")
        values = [k if k % 2 else None for k in range(20)]
        shown(values, stopping, LearningRateScheduler(drops_at(11)), model=compiled(SGD(0.1)))
        assert without_falls(stopping)[0].reason.endswith("the learning rate is still to drop")
        assert stopping.stopped_epoch_ == 11

    def test_while_a_plateau_may_still_lower_it(self) -> None:
        """It falls after 3 epochs and after 2 more; a third fall would be negligible."""
        plateau = ReduceLROnPlateau("loss", factor=0.05, patience=2, min_delta=1e9)
        for stopping in (self.stop(plateau), self.stop(plateau, start_from_epoch=1)):
            held, just_lowered, stop = without_falls(stopping)
            assert held.reason.endswith(f"held, as {PLATEAU}")
            assert just_lowered.reason.endswith("the learning rate is still to drop")
            assert stop.action == "stop"
            rates = [0.1] * 3 + [0.005] * 2 + [0.00025]
            np.testing.assert_allclose(stopping._evaluations.rates, rates, rtol=1e-6)

    @pytest.mark.parametrize(
        "options",
        [{"min_lr": 0.1}, {"factor": 1e-4}, {"patience": 100}, {"patience": 5, "cooldown": 9}],
        ids=str,
    )
    def test_but_not_for_a_plateau_that_cannot(self, options: dict[str, Any]) -> None:
        plateau = ReduceLROnPlateau("loss", **options)
        plateau_cools = "cooldown" in options
        watch = RateWatch([plateau])
        plateau.cooldown_counter = options.get("cooldown", 0)
        optimizer = SGD(0.1)
        watch.epoch_begins(optimizer)
        rate = watch.epoch_ends(optimizer, 0, 13)
        assert watch.reason_to_wait([rate], 0) is None
        if not plateau_cools:
            assert self.stop(plateau).stopped_epoch_ == 2

    def test_after_a_plateau_has_just_lowered_it(self) -> None:
        """It comes first in the list: the epoch that ends has not seen the new rate."""
        watch, optimizer = RateWatch(), SGD(0.1)
        watch.epoch_begins(optimizer)
        optimizer.learning_rate = 0.01
        rate = watch.epoch_ends(optimizer, 5, 20)
        assert rate == pytest.approx(0.1)
        assert watch.reason_to_wait([rate] * 6, 5) == "the learning rate is still to drop"

    def test_without_knowledge_nothing_is_held(self) -> None:
        several = keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(SGD(0.1), {".*a/.*": SGD(0.2)})
        )
        assert self.stop(optimizer=several).stopped_epoch_ == 2
        callable_rate = SGD(lambda: 0.1)
        assert self.stop(optimizer=callable_rate).stopped_epoch_ == 2

    def test_a_resumed_fit_knows_the_rates_before_it(self, tmp_path: Any) -> None:
        def run(epochs: int, initial: int = 0, model: Any = None) -> Any:
            stopping = PredictiveEarlyStopping("val_loss", state_path=tmp_path / "state.json")
            shown(
                FALLING, stopping, LearningRateScheduler(drops_at(4)),
                model=model, epochs=epochs, initial_epoch=initial,
            )  # fmt: skip
            return stopping

        model = compiled(SGD(0.1))
        run(2, model=model)
        stopping = run(EPOCHS, 2, model)
        assert stopping.stopped_epoch_ == 4
        np.testing.assert_allclose(stopping._evaluations.rates, [0.1] * 4 + [0.01], rtol=1e-6)
