"""Fails when Keras changes a private name that this package reads, and says which."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from keras_ext.backends import internals


class Composite(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(2)
        self.rest = [layers.Dense(2), layers.Dense(2)]
        self.scale = self.add_weight(shape=(), name="scale")

    def call(self, x: Any) -> Any:
        for layer in (self.first, *self.rest):
            x = layer(x)
        return x * self.scale


@pytest.fixture
def composite() -> Composite:
    layer = Composite()
    layer(np.ones((1, 2)))
    return layer


def test_own_variables_are_a_layer_s_own_also_when_frozen(composite: Composite) -> None:
    assert [v.name for v in internals.own_variables(composite)] == ["scale"]
    composite.trainable = False
    assert [v.name for v in internals.own_variables(composite.first)] == ["kernel", "bias"]


def test_sublayers_in_order(composite: Composite) -> None:
    assert internals.sublayers(composite) == [composite.first, *composite.rest]


def test_lists_are_the_user_s_own_on_every_backend(composite: Composite) -> None:
    assert list(internals.layer_lists(composite)) == ["rest"]


def test_calls_of_a_functional_model() -> None:
    inputs = keras.Input((2,))
    shared = layers.Dense(2, name="shared")
    model = keras.Model(inputs, shared(layers.Dense(2, name="between")(shared(inputs))))
    assert internals.is_functional(model)
    assert not internals.is_functional(shared)
    names = [node.operation.name for node in internals.calls(model)][1:]
    assert names == ["shared", "between", "shared"]


def test_hooks_of_an_optimizer_are_called_in_a_step() -> None:
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    variable = keras.Variable(np.ones(3, "float32"))
    optimizer.build([variable])
    fused = hasattr(optimizer, internals.FUSED_UPDATE_STEP)
    assert fused == (keras.backend.backend() == "torch")
    called = []
    update = internals.FUSED_UPDATE_STEP if fused else internals.UPDATE_STEP
    for name in (update, internals.WEIGHT_DECAY, internals.CURRENT_RATE):
        original = getattr(optimizer, name)

        def spy(*args: Any, name: str = name, original: Any = original) -> Any:
            called.append(name)
            return original(*args)

        setattr(optimizer, name, spy)
    optimizer.apply([keras.ops.ones(3)])
    assert {update, internals.WEIGHT_DECAY, internals.CURRENT_RATE} == set(called)
    key = internals.variable_key(optimizer, variable)
    assert key == internals.variable_key(optimizer, variable)
    assert internals.takes_weight_decay(optimizer, variable)


def test_nadam_keeps_one_product_for_all() -> None:
    optimizer = keras.optimizers.Nadam()
    optimizer.build([keras.Variable(np.ones(3, "float32"))])
    (product,) = internals.shared_state(optimizer)
    assert float(keras.ops.convert_to_numpy(product)) == 1.0
    assert internals.shared_state(keras.optimizers.Adam()) == []


def test_a_callback_keeps_its_model_where_pickling_drops_it() -> None:
    callback, model = keras.callbacks.Callback(), keras.Sequential([layers.Dense(1)])
    callback.set_model(model)
    assert vars(callback)[internals.CALLBACK_MODEL] is model


def test_the_schedule_of_an_optimizer_and_the_steps_that_it_counts() -> None:
    asked = []

    class Spy(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            asked.append(int(keras.ops.convert_to_numpy(step)))
            return 0.1

    schedule = Spy()
    optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=2)
    assert internals.schedule_of(optimizer) is schedule
    assert internals.schedule_of(keras.optimizers.SGD(0.1)) is None
    variable = keras.Variable(np.ones(3, "float32"))
    optimizer.build([variable])
    for _ in range(3):
        optimizer.apply([keras.ops.ones(3)])
    float(optimizer.learning_rate)
    assert internals.schedule_steps(optimizer) == asked[-1] == 3
    assert internals.schedule_steps(object()) is None


def test_siblings_are_all_callbacks_of_the_fit_that_is_running() -> None:
    found: list[list[keras.callbacks.Callback]] = []

    class Looks(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            found.append(internals.siblings())

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if len(found) < 2:
                model.fit(np.ones((2, 2)), np.ones((2, 1)), callbacks=[inner], verbose=0)

    outer, inner, other = Looks(), Looks(), keras.callbacks.TerminateOnNaN()
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), callbacks=[outer, other], verbose=0)
    first, second = found
    assert first[:2] == [outer, other]
    assert second[0] is inner
    assert outer not in second
    assert internals.siblings() == []


def test_layers_made_under_a_scope_of_rematerialization() -> None:
    with keras.RematScope("full"):
        inside = layers.Dense(1)
    assert internals.is_rematerialized(inside)
    assert not internals.is_rematerialized(layers.Dense(1))
