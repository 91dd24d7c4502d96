"""The learning rates to come: they come true, and to foresee them changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from keras.callbacks import LearningRateScheduler
from keras.optimizers import SGD, schedules

from keras_ext import PredictiveEarlyStopping
from keras_ext._schedule import RateWatch
from keras_ext.backends.internals import siblings
from tests.keras_ext.callbacks.curves import FALLING, NEVER, compiled, drops_at, piecewise, shown
from tests.keras_ext.helpers import STEPS, fit

EPOCHS = 12
ASKED: list[int] = []


def halves(epoch: int, rate: float) -> float:
    return rate * 0.5 if epoch and epoch % 4 == 0 else rate


def only_epoch(epoch: int) -> float:
    return 0.1 * 0.9**epoch


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
        ASKED.clear()

        def schedule(epoch: int, rate: float) -> float:
            ASKED.append(epoch)
            return 0.1

        watch, optimizer = RateWatch([LearningRateScheduler(schedule)]), SGD(0.1)
        for epoch in range(700):
            watch.epoch_begins(optimizer)
            watch.epoch_ends(optimizer, epoch, 10**9)
            assert 499 <= len(watch.ahead(epoch)) <= 1000
        assert len(ASKED) == 2000
        assert len(watch.ahead(699, 7)) == len(watch.ahead(699)) // 7


class TestAskingIsHarmless:
    """A schedule answers in the run as if it had never been asked ahead."""

    @pytest.mark.parametrize(
        "kind", ["closure", "nonlocal", "object", "method", "default", "partial", "generator"]
    )
    def test_of_a_schedule_with_state(self, kind: str) -> None:
        def make() -> Callable[..., float]:
            calls, rate = [0], 0.1
            also: list[int] = []

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

            def default(
                epoch: int, lr: float, n: list[int] = calls, *, seen: list[int] = also
            ) -> float:
                n[0] += 1
                seen.append(epoch)
                return 0.1 / (n[0] + len(seen))

            counter, generator = Counter(), np.random.default_rng(0)
            made: dict[str, Callable[..., float]] = {
                "closure": closure,
                "nonlocal": reassigns,
                "object": counter,
                "method": counter.__call__,
                "default": default,
                "partial": partial(
                    lambda calls, epoch, lr: calls.append(1) or 0.1 / len(calls), []
                ),
                "generator": lambda epoch, lr: float(generator.uniform()),
            }
            return made[kind]

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

    @pytest.mark.parametrize(
        "draw", [lambda: random.random(), lambda: np.random.rand()], ids=["python", "numpy"]
    )
    def test_of_one_that_draws_random_numbers(self, draw: Callable[[], float]) -> None:
        def run(*others: keras.callbacks.Callback) -> list[float]:
            keras.utils.set_random_seed(0)
            schedule = LearningRateScheduler(lambda epoch, lr: float(draw()))
            history = fit(compiled(SGD(0.1)), schedule, *others, shuffle=True, epochs=6).history
            return [*history["learning_rate"], *history["loss"], random.random(), np.random.rand()]

        rates = Rates()
        assert run(rates) == run()
        assert len(rates.foreseen[0]) == 5

    @pytest.mark.parametrize(
        "holds", ["model", "optimizer", "iterator", "generator", "function", "much", "self"]
    )
    @pytest.mark.parametrize("method", [True, False])
    def test_of_one_with_more_in_reach_than_plain_values(self, holds: str, method: bool) -> None:
        """It is not asked, and not copied."""
        model = compiled(SGD(0.1))

        class Owner:
            def __init__(self) -> None:
                self.asked: list[int] = []
                self.held = {
                    "model": [model],
                    "optimizer": {"of": model.optimizer},
                    "iterator": iter([1]),
                    "generator": random.Random(0).random,
                    "function": lambda: model,
                    "much": [0] * 20_000,
                    "self": self,
                }[holds]

            def __deepcopy__(self, memo: Any) -> Any:
                raise AssertionError

            def rate(self, epoch: int, lr: float) -> float:
                self.asked.append(epoch)
                return 0.1

        owner, rates = Owner(), Rates()
        schedule = owner.rate if method else lambda epoch, lr: owner.rate(epoch, lr)
        fit(model, LearningRateScheduler(schedule), rates, epochs=4)
        assert owner.asked == [0, 1, 2, 3]
        assert rates.foreseen == [[], [], [], []]

    def test_one_that_failed_is_not_asked_again(self) -> None:
        ASKED.clear()

        def schedule(epoch: int, lr: float) -> float:
            ASKED.append(epoch)
            return {0: 0.1, 1: 0.1}[epoch]

        watch, optimizer = RateWatch([LearningRateScheduler(schedule)]), SGD(0.1)
        for epoch in range(3):
            watch.epoch_begins(optimizer)
            watch.epoch_ends(optimizer, epoch, 9)
        assert ASKED == [1, 2]

    def test_in_silence(self, capsys: pytest.CaptureFixture[str]) -> None:
        rates = Rates()
        fit(compiled(), *CALLBACKS["verbose"](), rates, epochs=5)
        assert capsys.readouterr().out == "asked\n" * 5
