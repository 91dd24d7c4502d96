"""How the callback comes and goes: repeated fits, failures, other callbacks, wrong input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, optimizers

from keras_ext import LayerwiseLRDecay
from strategies.decisions import DecisionLog
from tests.keras_ext.helpers import (
    BACKEND,
    DECAY,
    ROWS,
    assert_same,
    data,
    fit,
    network,
    warned,
    weights,
)


def sgd() -> keras.Optimizer:
    return optimizers.SGD(0.1)


def compiled(optimizer: keras.Optimizer | None = None, **options: Any) -> keras.Model:
    model = network()
    model.compile(optimizer or sgd(), "mse", **options)
    return model


def fitted(*callbacks: keras.callbacks.Callback, epochs: int = 2) -> dict[str, np.ndarray]:
    """Weights of a fresh model after one fit."""
    model = compiled()
    fit(model, *callbacks, epochs=epochs)
    return weights(model)


def plain_from(values: list[Any], epochs: int = 1) -> dict[str, np.ndarray]:
    """Weights that a plain fit makes of the given ones."""
    model = compiled()
    model.set_weights(values)
    fit(model, epochs=epochs)
    return weights(model)


def attributes(thing: Any) -> set[str]:
    return set(vars(thing))


class Fails(keras.callbacks.Callback):
    """Ends the fit by an exception, before its second epoch by default."""

    def __init__(self, hook: str = "on_epoch_begin", at: int = 1) -> None:
        super().__init__()

        def fail(index: int, logs: Any = None) -> None:
            if index == at:
                raise RuntimeError("boom")

        setattr(self, hook, fail)


class Counts(keras.callbacks.Callback):
    """Counts the batches that were begun."""

    batches = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.batches += 1


class OwnWay(optimizers.SGD):
    """Updates variables without `update_step`."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            self.build(trainable_variables)
        for g, v in zip(grads, self._trainable_variables, strict=True):
            v.assign(v - 0.1 * g)
        self.iterations.assign(self.iterations + 1)


class TestRepeatedFits:
    def test_a_plain_fit_afterwards_is_plain(self) -> None:
        model = compiled()
        fit(model, LayerwiseLRDecay(DECAY), epochs=2)
        before = model.get_weights()
        fit(model, epochs=1)
        assert_same(weights(model), plain_from(before), rtol=0)

    def test_a_plain_fit_before_changes_nothing(self) -> None:
        model = compiled()
        fit(model, epochs=1)
        before = model.get_weights()
        fit(model, LayerwiseLRDecay(DECAY), epochs=2)
        other = compiled()
        other.set_weights(before)
        fit(other, LayerwiseLRDecay(DECAY), epochs=2)
        assert_same(weights(model), weights(other), rtol=0)

    def test_a_second_fit_starts_afresh(self) -> None:
        model, callback = compiled(), LayerwiseLRDecay(DECAY)
        fit(model, callback, epochs=2)
        between = model.get_weights()
        fit(model, callback, epochs=2)
        other = compiled()
        other.set_weights(between)
        fit(other, LayerwiseLRDecay(DECAY), epochs=2)
        assert_same(weights(model), weights(other), rtol=0)
        assert len(callback.decisions_) == 1

    def test_another_decay_in_the_second_fit(self) -> None:
        model = compiled()
        fit(model, LayerwiseLRDecay(0.9), epochs=1)
        between = model.get_weights()
        fit(model, LayerwiseLRDecay(DECAY), epochs=1)
        other = compiled()
        other.set_weights(between)
        fit(other, LayerwiseLRDecay(DECAY), epochs=1)
        assert_same(weights(model), weights(other), rtol=0)

    def test_freezing_between_fits(self) -> None:
        model, callback = compiled(), LayerwiseLRDecay(DECAY)
        fit(model, callback, epochs=1)
        before = dict(callback.multipliers_)
        model.get_layer("a").trainable = False
        model.compile(sgd(), "mse")
        frozen = weights(model)
        fit(model, callback, epochs=1)
        assert callback.multipliers_ == before
        moved = {path for path, value in weights(model).items() if (value != frozen[path]).any()}
        assert {path.split("/")[-2] for path in moved} == {"b", "c"}

    def test_nothing_is_left_behind(self) -> None:
        plain, model = compiled(), compiled()
        fit(plain)
        fit(model, LayerwiseLRDecay(DECAY))
        assert attributes(model) == attributes(plain)
        assert attributes(model.optimizer) == attributes(plain.optimizer)
        assert model.train_function is None

    def test_evaluation_in_between_and_during(self) -> None:
        x, y = data()
        model, callback = compiled(), LayerwiseLRDecay(DECAY)
        fit(model, callback, epochs=2, validation_data=(x, y))
        model.evaluate(x, y, callbacks=[callback], verbose=0)
        model.predict(x, callbacks=[callback], verbose=0)
        assert_same(weights(model), fitted(LayerwiseLRDecay(DECAY)), rtol=0)
        assert len(callback.decisions_) == 1


class TestFailures:
    @pytest.mark.parametrize("hook", ["on_epoch_begin", "on_train_batch_end"])
    def test_a_plain_fit_after_an_exception_is_plain(self, hook: str) -> None:
        model = compiled()
        with pytest.raises(RuntimeError, match="boom"):
            fit(model, LayerwiseLRDecay(DECAY), Fails(hook))
        before = model.get_weights()
        fit(model, epochs=1)
        assert_same(weights(model), plain_from(before), rtol=0)
        plain = compiled()
        fit(plain)
        assert attributes(model.optimizer) == attributes(plain.optimizer)

    def test_train_on_batch_after_an_exception_is_plain(self) -> None:
        x, y = data()
        model, other = compiled(), compiled()
        with pytest.raises(RuntimeError, match="boom"):
            fit(model, LayerwiseLRDecay(DECAY), Fails())
        other.set_weights(model.get_weights())
        model.train_on_batch(x, y)
        other.train_on_batch(x, y)
        assert_same(weights(model), weights(other), rtol=0)

    def test_a_fit_with_it_after_an_exception_scales_once(self) -> None:
        model, callback = compiled(), LayerwiseLRDecay(DECAY)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="boom"):
                fit(model, callback, Fails(at=0))
        fit(model, callback, epochs=2)
        assert_same(weights(model), fitted(LayerwiseLRDecay(DECAY)), rtol=0)

    def test_two_in_one_fit(self) -> None:
        model, counts = compiled(), Counts()
        before = weights(model)
        with pytest.raises(ValueError, match=r"pass one.*groups="):
            fit(model, LayerwiseLRDecay(0.9), LayerwiseLRDecay(0.8), counts)
        assert counts.batches == 0
        assert_same(weights(model), before, rtol=0)
        fit(model, epochs=2)
        assert_same(weights(model), fitted(), rtol=0)

    def test_an_optimizer_that_goes_its_own_way_is_noticed(self) -> None:
        model, other, callback = compiled(OwnWay(0.1)), compiled(OwnWay(0.1)), LayerwiseLRDecay(0.5)
        with warned("OwnWay made no update through its update_step"):
            fit(model, callback)
        assert [d.action for d in callback.decisions_][-1] == "fall back"
        fit(other)
        assert_same(weights(model), weights(other), rtol=0)

    def test_an_optimizer_that_only_waits_is_fine(self) -> None:
        model, other = (compiled(optimizers.SGD(0.1, gradient_accumulation_steps=8)) for _ in "ab")
        callback = LayerwiseLRDecay(0.5)
        fit(model, callback, epochs=1)  # of two steps
        fit(other, epochs=1)
        assert_same(weights(model), weights(other), rtol=0)
        assert [d.action for d in callback.decisions_] == ["set rates"]

    def test_an_optimizer_that_extends_apply_is_fine(self) -> None:
        class Centralised(optimizers.SGD):
            def apply(self, grads: Any, trainable_variables: Any = None) -> None:
                super().apply([0.5 * g for g in grads], trainable_variables)

        model, other = compiled(Centralised(0.2)), compiled()
        fit(model, LayerwiseLRDecay(DECAY))
        fit(other, LayerwiseLRDecay(DECAY))
        assert_same(weights(model), weights(other))


def refused(
    model: keras.Model, error: type[Exception], match: str, callback: LayerwiseLRDecay | None = None
) -> None:
    """The fit raises before its first batch, and leaves everything as it was."""
    counts, before = Counts(), weights(model)
    with pytest.raises(error, match=match):
        fit(model, callback or LayerwiseLRDecay(DECAY), counts)
    assert counts.batches == 0
    assert_same(weights(model), before, rtol=0)


class TestWrongInput:
    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"decay": 0.0}, ValueError),
            ({"decay": 1.5}, ValueError),
            ({"decay": float("nan")}, ValueError),
            ({"decay": "0.5"}, TypeError),
            ({"groups": "a"}, TypeError),
            ({"groups": []}, ValueError),
            ({"groups": [1]}, TypeError),
            ({"no_decay_on_bias_and_norm": 1}, TypeError),
        ],
    )
    def test_at_construction(self, arguments: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error):
            LayerwiseLRDecay(**arguments)

    def test_patterns_that_do_not_fit(self) -> None:
        refused(compiled(), ValueError, "'nowhere'", LayerwiseLRDecay(groups=["nowhere"]))
        refused(compiled(), ValueError, "both claim", LayerwiseLRDecay(groups=["a", "a/*"]))

    def test_ftrl(self) -> None:
        refused(compiled(optimizers.Ftrl(0.1)), TypeError, "Ftrl.*AdamW")

    def test_multi_optimizer(self) -> None:
        several = optimizers.MultiOptimizer(optimizers.OptimizerMap(sgd()))
        refused(compiled(several), TypeError, "MultiOptimizer.*one")

    @pytest.mark.skipif(BACKEND != "tensorflow", reason="right on other backends")
    def test_schedule_free_that_would_wipe_the_weights(self) -> None:
        refused(compiled(optimizers.ScheduleFreeAdamW(0.1)), ValueError, "optimizer.build")

    def test_nothing_to_train(self) -> None:
        model = compiled()
        model.trainable = False
        refused(model, ValueError, "trainable")

    def test_no_optimizer(self) -> None:
        model = compiled()
        model.optimizer = None
        refused(model, ValueError, "optimizer")

    def test_another_kind_of_model(self) -> None:
        with pytest.raises(TypeError, match="Keras 3"):
            LayerwiseLRDecay().set_model(object())

    def test_an_unbuilt_model_is_refused_before_any_update(self) -> None:
        model = keras.Sequential([layers.Dense(3), layers.Dense(1)])
        model.compile(sgd(), "mse")
        with pytest.raises(ValueError, match="'nowhere'"):
            fit(model, LayerwiseLRDecay(groups=["nowhere"]))
        assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 0


class Subclassed(keras.Model):
    """Builds itself on the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = layers.Dense(4, activation="tanh")
        self.head = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(self.stem(x))


@pytest.mark.parametrize("eagerly", [False, True], ids=["traced", "eager"])
@pytest.mark.parametrize(
    "make",
    [Subclassed, lambda: keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(1)])],
    ids=["subclassed", "sequential"],
)
def test_models_that_are_built_by_the_first_batch(
    make: Callable[[], keras.Model], eagerly: bool
) -> None:
    after = []
    for build_before in (False, True):
        keras.utils.set_random_seed(0)
        model, callback = make(), LayerwiseLRDecay(DECAY)
        if build_before:
            model(data()[0])
        model.compile(optimizers.AdamW(0.01, weight_decay=0.1), "mse", run_eagerly=eagerly)
        fit(model, callback, epochs=1)
        assert callback.levels_ == {0: 0.5, 1: 1.0}
        assert [decision.step for decision in callback.decisions_] == [0]
        after.append(weights(model))
    assert_same(*after)


def test_groups_decide_instead_of_the_structure() -> None:
    callback = LayerwiseLRDecay(DECAY, groups=["a", "b"])
    fitted(callback)
    assert callback.multipliers_ == {
        "a/kernel": 0.25,
        "b/kernel": 0.5,
        "b/bias": 0.5,
        "c/kernel": 1.0,
    }
    by_name = LayerwiseLRDecay(DECAY, groups=lambda name: int(name.startswith("c")))
    fitted(by_name)
    assert by_name.levels_ == {0: 0.5, 1: 1.0}


def test_shared_and_nested_layers_move_at_their_deepest_level() -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        inside = keras.Sequential(
            [keras.Input((4,)), layers.Dense(4, name="x"), layers.Dense(4, name="y")], name="inside"
        )
        inputs = keras.Input((4,))
        shared = layers.Dense(4, name="shared", activation="tanh")
        outputs = layers.Dense(1, name="head")(shared(inside(shared(inputs))))
        model = keras.Model(inputs, outputs)
        model.compile(optimizers.SGD(0.1), "mse")
        return model

    plain, model, callback = make(), make(), LayerwiseLRDecay(DECAY)
    before = weights(model)
    for m, callbacks in ((plain, []), (model, [callback])):
        fit(m, *callbacks, epochs=1, batch_size=ROWS)
    expected = {"x": 0.125, "y": 0.25, "shared": 0.5, "head": 1.0}
    assert {name.split("/")[-2]: m for name, m in callback.multipliers_.items()} == expected
    for (path, after), full in zip(weights(model).items(), weights(plain).values(), strict=True):
        factor = expected[path.split("/")[-2]]
        np.testing.assert_allclose(
            after - before[path], factor * (full - before[path]), rtol=1e-4, atol=3e-7
        )


def test_decision_tells_levels_and_lowest_factor() -> None:
    callback = LayerwiseLRDecay(DECAY)
    fitted(callback)
    assert isinstance(callback.decisions_, DecisionLog)
    (decision,) = callback.decisions_
    assert decision.action == "set rates"
    assert decision.reason == "3 levels from a/kernel (x0.25) to c/kernel (x1)"
    assert decision.numbers == {"levels": 3.0, "lowest": 0.25}
    assert decision.step == 0


def test_repr_shows_what_differs_from_the_default() -> None:
    assert repr(LayerwiseLRDecay()) == "LayerwiseLRDecay(decay=0.75)"
    assert repr(LayerwiseLRDecay(0.5, ["a"], True)) == (
        "LayerwiseLRDecay(decay=0.5, groups=['a'], no_decay_on_bias_and_norm=True)"
    )


def test_rates_set_by_other_callbacks_are_base_rates() -> None:
    """A callback that reads the optimizer's rate sees it unscaled."""
    seen = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    fitted(LayerwiseLRDecay(DECAY), Reads())
    assert set(np.float32(seen)) == {np.float32(0.1)}
