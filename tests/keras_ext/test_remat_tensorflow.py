"""Blocks and steps that tensorflow cannot run again without harm are trained plainly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers, ops

from keras_ext import DynamicGradientCheckpointing
from tests.keras_ext.helpers import BACKEND, warned
from tests.keras_ext.recompute_models import LENGTH, WIDTH, Simple
from tests.keras_ext.test_gradient_checkpointing import assert_equal, everything, fit
from tests.keras_ext.test_recompute_oddities import compare, stack

if BACKEND != "tensorflow":
    pytest.skip("tensorflow alone", allow_module_level=True)

import tensorflow as tf


def blocks(*kinds: Callable[..., keras.Layer]) -> Callable[[int], keras.Layer]:
    return lambda i: kinds[i](name=f"block_{i}")


def kept(block: str, why: str) -> str:
    return rf"block '{block}' cannot be run again \(it {why}\); it is kept. Put it in exclude="


def run_again(callback: DynamicGradientCheckpointing) -> set[str]:
    return {block.name for block in callback.report_.blocks} - {"other code"}


def test_tensors_that_go_through_attributes() -> None:
    shelf: dict[str, Any] = {}

    class Gives(Simple):
        def call(self, x: Any) -> Any:
            shelf["output"] = super().call(x)
            return shelf["output"]

    class Takes(Simple):
        def inner(self, x: Any) -> Any:
            return self.up(x * ops.mean(shelf["output"]))

    for block, why in (("block_0", "hands out a tensor"), ("block_1", "takes a tensor")):
        ours = compare(blocks(Gives, Takes, Simple), kept(block, f"{why} that .*"))
        assert run_again(ours) == {"block_2"}


def test_tensors_without_gradients_may_go_through_attributes() -> None:
    shelf: dict[str, Any] = {}

    class Shows(Simple):
        def inner(self, x: Any) -> Any:
            shelf["inner"] = ops.stop_gradient(self.up(x))
            return self.up(x)

    class Looks(Simple):
        def inner(self, x: Any) -> Any:
            return self.up(x) + ops.mean(shelf["inner"])

    assert run_again(compare(blocks(Shows, Looks, Simple))) == {"block_0", "block_1", "block_2"}


def looked_up(optimizer: keras.Optimizer, *callbacks: Any) -> keras.Model:
    class Looks(Simple):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.table = layers.Embedding(3, WIDTH)

        def inner(self, x: Any) -> Any:
            return self.up(x + self.table(ops.cast(ops.abs(x[..., 0]), "int32") % 3))

    model = stack(blocks(Simple, Looks, Simple))
    model.compile(optimizer, "mse", jit_compile=False)
    fit(model, *callbacks)
    return model


@pytest.mark.parametrize(
    ("name", "options"), [("Adam", {}), ("SGD", {"clipnorm": 1e-2}), ("SGD", {"momentum": 0.9})]
)
def test_gradients_of_rows_of_a_variable(name: str, options: dict[str, Any]) -> None:
    linear = "momentum" in options
    make = getattr(keras.optimizers, name)
    plain, ours = looked_up(make(0.01, **options)), DynamicGradientCheckpointing(0.9)
    if linear:
        model = looked_up(make(0.01, **options), ours)
    else:
        with warned(kept("block_1", "looks up rows of a variable, .*")):
            model = looked_up(make(0.01, **options), ours)
    assert_equal(everything(model), everything(plain))
    assert ("block_1" in run_again(ours)) == linear


def test_gradients_that_a_block_takes() -> None:
    class Differentiates(Simple):
        def inner(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                energy = ops.sum(ops.square(self.up(x)))
            return self.up(x + 0.1 * tape.gradient(energy, x))

    ours = compare(blocks(Simple, Differentiates, Simple), kept("block_1", "takes gradients"))
    assert run_again(ours) == {"block_0", "block_2"}


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variables_that_a_block_does_not_use() -> None:
    class Idle(Simple):
        def build(self, shape: Any) -> None:
            self.idle = self.add_weight(shape=(3,), initializer="ones")

    why = "does not use all that it trains"
    ours = compare(blocks(Simple, Idle, Simple), kept("block_1", why))
    assert run_again(ours) == {"block_0", "block_2"}


class Penalized(keras.Model):
    """Trains with the gradient of its output in the loss."""

    steps = 0

    def train_step(self, batch: Any) -> dict[str, Any]:
        Penalized.steps += 1
        x, y = batch
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                output = self(x, training=True)
            penalty = tf.reduce_mean(tf.square(inner.gradient(output, x)))
            loss = tf.reduce_mean(tf.square(output - y)) + penalty
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("eager", [False, True])
def test_steps_of_your_own(eager: bool) -> None:
    def trained(*callbacks: Any) -> tuple[keras.Model, int]:
        x = inputs = keras.Input((LENGTH, 4))
        keras.utils.set_random_seed(0)
        for layer in (layers.Dense(WIDTH), *map(blocks(Simple, Simple), range(2)), layers.Dense(1)):
            x = layer(x)
        model = Penalized(inputs, x)
        model.compile("sgd", jit_compile=False, run_eagerly=eager)
        Penalized.steps = 0
        fit(model, *callbacks)
        return model, Penalized.steps

    plain, steps = trained()
    why = "a train_step of your own is not traced" if eager else "are run again fails .NotImpl"
    with warned(f"{why}.*: the fit is a plain one"):
        model, ours = trained(DynamicGradientCheckpointing(0.6))
    assert_equal(everything(model), everything(plain))
    assert not eager or ours == steps
