"""PredictiveEarlyStopping and the learning rate: foreseen rates come true, and are waited for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras.callbacks import LearningRateScheduler, ReduceLROnPlateau
from keras.optimizers import SGD, schedules

from keras_ext import PredictiveEarlyStopping
from keras_ext._schedule import PLATEAU, RateWatch
from keras_ext.backends.internals import siblings
from tests.keras_ext.callbacks.curves import FALLING, NEVER, compiled, shown, without_falls
from tests.keras_ext.helpers import STEPS, fit

EPOCHS = 12


def drops_at(epoch: int) -> Callable[[int, float], float]:
    return lambda e, rate: 0.01 if e >= epoch else 0.1


def halves(epoch: int, rate: float) -> float:
    return rate * 0.5 if epoch and epoch % 4 == 0 else rate


def only_epoch(epoch: int) -> float:
    return 0.1 * 0.9**epoch


def piecewise(*epochs: int) -> Any:
    """Drops by ten as these epochs begin; Keras counts a boundary to the rate before it."""
    steps = [STEPS * epoch - 1 for epoch in epochs]
    return schedules.PiecewiseConstantDecay(steps, [0.1 / 10**i for i in range(len(steps) + 1)])


class Custom(schedules.LearningRateSchedule):
    """Looks at the step as a number, as schedules may where no graph is built."""

    def __call__(self, step: Any) -> Any:
        return 0.1 * keras.ops.power(0.99, keras.ops.cast(step, "float32"))


class Rates(keras.callbacks.Callback):
    """Foresees after each epoch, and notes what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.foreseen: list[list[float]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.watch = RateWatch(siblings())

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.watch.epoch_begins(self.model.optimizer)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        rate = self.watch.epoch_ends(self.model.optimizer, epoch, self.params["epochs"])
        self.seen.append(rate)
        self.foreseen.append(self.watch.ahead(epoch))


OPTIMIZERS = {
    "piecewise": lambda: SGD(piecewise(3, 7)),
    "cosine": lambda: SGD(schedules.CosineDecay(0.1, EPOCHS * STEPS, warmup_target=0.2,
                                                warmup_steps=5)),
    "exponential": lambda: SGD(schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)),
    "polynomial": lambda: SGD(schedules.PolynomialDecay(0.1, 10)),
    "custom": lambda: SGD(Custom()),
    "accumulated": lambda: SGD(piecewise(5), gradient_accumulation_steps=2),
    "number": lambda: SGD(0.1),
}  # fmt: skip
CALLBACKS = {
    "drop": lambda: [LearningRateScheduler(drops_at(5))],
    "recursive": lambda: [LearningRateScheduler(halves)],
    "one argument": lambda: [LearningRateScheduler(only_epoch)],
    "two": lambda: [LearningRateScheduler(drops_at(5)), LearningRateScheduler(halves)],
    "verbose": lambda: [LearningRateScheduler(lambda e, rate: print("asked") or 0.1 / (1 + e))],
}


class TestForesight:
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_schedules_come_true(self, make: Callable[[], Any]) -> None:
        rates = Rates()
        fit(compiled(make()), rates, epochs=EPOCHS)
        for epoch, foreseen in enumerate(rates.foreseen):
            np.testing.assert_allclose(foreseen, rates.seen[epoch + 1 :], rtol=1e-6)

    @pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS)
    @pytest.mark.parametrize("first", [True, False])
    def test_callbacks_come_true(self, make: Callable[[], list[Any]], first: bool) -> None:
        rates = Rates()
        callbacks = [rates, *make()] if first else [*make(), rates]
        history = fit(compiled(SGD(0.1)), *callbacks, epochs=EPOCHS)
        np.testing.assert_allclose(rates.seen, history.history["learning_rate"], rtol=1e-6)
        for epoch, foreseen in enumerate(rates.foreseen):
            np.testing.assert_allclose(foreseen, rates.seen[epoch + 1 :], rtol=1e-6)

    def test_the_rate_of_the_last_step_of_each_epoch(self) -> None:
        """What a callback sees that reads the optimizer just before that step."""
        schedule, rates, before = piecewise(3, 7), Rates(), []

        class Reads(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                if batch == STEPS - 1:
                    rate = self.model.optimizer.learning_rate
                    before.append(float(keras.ops.convert_to_numpy(rate)))

        fit(compiled(SGD(schedule)), rates, Reads(), epochs=EPOCHS)
        np.testing.assert_allclose(rates.seen, before, rtol=1e-6)
        np.testing.assert_allclose(before, [0.1] * 3 + [0.01] * 4 + [0.001] * 5, rtol=1e-6)

    def test_under_loss_scaling(self) -> None:
        rates = Rates()
        fit(compiled(keras.optimizers.LossScaleOptimizer(SGD(piecewise(5)))), rates, epochs=8)
        np.testing.assert_allclose(rates.foreseen[0], [0.1] * 4 + [0.01] * 3, rtol=1e-6)

    def test_in_a_resumed_fit(self) -> None:
        model, rates = compiled(SGD(piecewise(5))), Rates()
        fit(model, epochs=3)
        fit(model, rates, epochs=8, initial_epoch=3)
        np.testing.assert_allclose(rates.foreseen[0], [0.1, 0.01, 0.01, 0.01], rtol=1e-6)

    def test_a_rate_that_another_callback_sets_is_taken_in(self) -> None:
        class Sets(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                if epoch == 1:
                    self.model.optimizer.learning_rate = 0.02

        rates = Rates()
        fit(compiled(SGD(0.1)), Sets(), LearningRateScheduler(halves), rates, epochs=7)
        np.testing.assert_allclose(rates.foreseen[0], [0.1] * 3 + [0.05] * 3, rtol=1e-6)
        np.testing.assert_allclose(rates.foreseen[1], [0.02] * 2 + [0.01] * 3, rtol=1e-6)
        np.testing.assert_allclose(rates.seen, [0.1] * 2 + [0.02] * 2 + [0.01] * 3, rtol=1e-6)

    def test_more_epochs_than_anyone_waits_for(self) -> None:
        asked = itertools.count()

        def schedule(epoch: int, rate: float) -> float:
            return 0.1 + 0 * next(asked)

        watch, optimizer = RateWatch([LearningRateScheduler(schedule)]), SGD(0.1)
        for epoch in range(700):
            watch.epoch_begins(optimizer)
            watch.epoch_ends(optimizer, epoch, 10**9)
            assert 499 <= len(watch.ahead(epoch)) <= 1000
        assert next(asked) == 2000
        assert len(watch.ahead(699, 7)) == len(watch.ahead(699)) // 7


class TestAskingIsHarmless:
    """A schedule answers in the run as if it had never been asked ahead."""

    @pytest.mark.parametrize("kind", ["closure", "nonlocal", "object", "method"])
    def test_of_a_schedule_with_state(self, kind: str) -> None:
        def make() -> Callable[..., float]:
            calls, rate = [0], 0.1

            class Counter:
                count = 0

                def __call__(self, epoch: int, lr: float) -> float:
                    self.count += 1
                    return 0.1 / self.count

            def closure(epoch: int, lr: float) -> float:
                calls[0] += 1
                return 0.1 / calls[0]

            def reassigns(epoch: int, lr: float) -> float:
                nonlocal rate
                rate *= 0.9
                return rate

            counter = Counter()
            made = {"closure": closure, "nonlocal": reassigns, "object": counter}
            return made.get(kind, counter.__call__)

        plain = fit(compiled(SGD(0.1)), LearningRateScheduler(make()), epochs=6).history
        rates = Rates()
        history = fit(compiled(SGD(0.1)), LearningRateScheduler(make()), rates, epochs=6).history
        assert history["learning_rate"] == plain["learning_rate"]
        for epoch, foreseen in enumerate(rates.foreseen):
            np.testing.assert_allclose(foreseen, rates.seen[epoch + 1 :], rtol=1e-6)

    def test_of_one_that_fails_ahead(self) -> None:
        table = [0.1] * 6
        stopping = PredictiveEarlyStopping("val_loss", **NEVER)
        history = shown(FALLING, stopping, LearningRateScheduler(lambda e, lr: table[e]), epochs=6)
        assert len(history.epoch) == 6
        rates = Rates()
        fit(compiled(), LearningRateScheduler(lambda e, lr: {0: 0.1, 1: 0.1}[e]), rates, epochs=2)
        assert rates.foreseen == [pytest.approx([0.1]), []]

    def test_in_silence(self, capsys: pytest.CaptureFixture[str]) -> None:
        rates = Rates()
        fit(compiled(), *CALLBACKS["verbose"](), rates, epochs=5)
        assert capsys.readouterr().out == "asked\n" * 5


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
        assert held.reason.endswith("; held, as the learning rate drops in 4 evaluations")
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
        assert without_falls(stopping)[0].reason.endswith(
            "the learning rate drops in 3 evaluations"
        )
        assert stopping.stopped_epoch_ == 11

    def test_while_a_plateau_may_still_lower_it(self) -> None:
        """It falls after 3 epochs and after 2 more; a third fall would be negligible."""
        plateau = ReduceLROnPlateau("loss", factor=0.05, patience=2, min_delta=1e9)
        for stopping in (self.stop(plateau), self.stop(plateau, start_from_epoch=1)):
            held, just_lowered, stop = without_falls(stopping)
            assert held.reason.endswith(f"held, as {PLATEAU}")
            assert just_lowered.reason.endswith("the learning rate drops in 1 evaluation")
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
        reason = watch.reason_to_wait([rate] * 6, 5)
        assert reason == "the learning rate drops in 1 evaluation"

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
