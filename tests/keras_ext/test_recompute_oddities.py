"""Blocks that cannot be run again, or only with care, do a fit no harm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import pytest
from keras import layers, ops

from keras_ext import DynamicGradientCheckpointing
from tests.keras_ext.helpers import BACKEND, warned
from tests.keras_ext.recompute_models import LENGTH, WIDTH, Block
from tests.keras_ext.test_gradient_checkpointing import assert_equal, everything, fit, untouched


def stack(block: Callable[[int], keras.Layer], **options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((LENGTH, 4))
    x = layers.Dense(WIDTH)(x)
    for i in range(3):
        x = block(i)(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("sgd", "mse", **{"jit_compile": BACKEND == "jax"} | options)
    return model


def compare(
    block: Callable[[int], keras.Layer],
    said: str | None = None,
    budget: float = 0.9,
    **options: Any,
) -> DynamicGradientCheckpointing:
    """Train plainly and with less of the activations."""
    plain = stack(block, **options)
    fit(plain)
    # A generator for all that is made anew in the first step, as in the plain run.
    keras.src.backend.common.global_state.set_global_attribute("global_seed_generator", None)
    ours, callback = stack(block, **options), DynamicGradientCheckpointing(budget)
    with warned(said) if said else nullcontext():
        fit(ours, callback)
    assert_equal(everything(ours), everything(plain))
    assert untouched(ours)
    return callback


class Drops(Block):
    """Draws from the generator that Keras has for all."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        y = super().call(x, training)
        return keras.random.dropout(y, 0.3) + 0.1 * keras.random.normal(ops.shape(y))


@pytest.mark.skipif(BACKEND == "jax", reason="Keras wants seeds there")
def test_the_seed_for_all_is_drawn_from_once() -> None:
    assert compare(lambda i: Drops(name=f"block_{i}")).plan_.spans


def test_what_assigns_to_what_it_trains_is_kept_and_that_is_said() -> None:
    def block(i: int) -> keras.Layer:
        if i != 1:
            return Block(name=f"block_{i}")
        inner = [layers.SpectralNormalization(layers.Dense(WIDTH)), layers.Dense(WIDTH, "tanh")]
        return keras.Sequential(inner, name=f"block_{i}")

    ours = compare(block, r"'block_1' cannot be run again \(.*it assigns to", 2)
    # On tensorflow it shows only when a plan is followed; then there is another.
    assert {block.name for block in ours.report_.blocks} == {"block_0", "block_2", "other code"}
    assert ours.plan_.spans


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tensorflow alone")
def test_random_numbers_that_cannot_be_drawn_again() -> None:
    import tensorflow as tf

    class Noisy(Block):
        def call(self, x: Any, training: bool | None = None) -> Any:
            return super().call(x, training) + 0 * tf.random.normal(tf.shape(x))

    class Decorated(Block):
        @tf.function
        def call(self, x: Any, training: bool | None = None) -> Any:
            return super().call(x, training)

    def block(i: int) -> keras.Layer:
        return (Block, Noisy, Decorated)[i](name=f"block_{i}")

    ours = compare(block, "block 'block_1' cannot be run again .it has RandomStandardNormal")
    told = " ".join(ours.report_.advice)
    assert "block_1 is not run again, as it has RandomStandardNormal" in told
    assert "block_2 is not run again, as it has" in told
    compare(lambda i: Noisy(name=f"block_{i}"), "no block is left that can be run again")


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tensorflow alone")
def test_a_step_that_cannot_be_traced() -> None:
    class Eager(Block):
        def call(self, x: Any, training: bool | None = None) -> Any:
            if training:
                x.numpy()
            return super().call(x, training)

    said = "what the step saves could not be seen"
    assert compare(lambda i: Eager(name=f"block_{i}"), said, run_eagerly=True).plan_ is None
