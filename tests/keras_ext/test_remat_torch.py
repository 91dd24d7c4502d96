"""Memory that torch takes, counted at every operator, against what was planned."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from keras_ext import DynamicGradientCheckpointing
from keras_ext.backends import call_state
from tests.keras_ext.helpers import BACKEND, assert_same, weights
from tests.keras_ext.recompute_models import LENGTH, built

if BACKEND != "torch":
    pytest.skip("torch alone", allow_module_level=True)

import torch

from benchmarks._memory import Peak

ROWS = 64


def peak(kind: str, *callbacks: Any, step: int = 1) -> int:
    """Bytes at most in a step, beyond what is there before it."""
    model = built(kind)
    counter = Peak()

    class Counts(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == step:
                model.zero_grad()
                counter.__enter__()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == step:
                counter.__exit__(None, None, None)

    x = np.random.default_rng(0).normal(size=(2 * ROWS, LENGTH, 4)).astype("float32")
    model.fit(x, x[:, :, :1], ROWS, callbacks=[*callbacks, Counts()], verbose=0)
    return counter.highest


@pytest.mark.parametrize("kind", ["transformer", "convolutional", "residual", "subclassed"])
def test_what_is_saved_is_what_was_predicted(kind: str) -> None:
    ours = DynamicGradientCheckpointing(0.5)
    plain, found = peak(kind), peak(kind, ours)
    predicted = ours.plan_.plain_peak - ours.plan_.peak
    assert plain - found == pytest.approx(predicted, rel=0.15)
    assert found <= 0.75 * plain


def test_the_step_that_measures_needs_little() -> None:
    kind = "transformer"
    found = peak(kind, DynamicGradientCheckpointing(0.5), step=0)
    assert found <= 0.75 * peak(kind, step=0)


@pytest.mark.matrix  # the compiler takes minutes
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_a_compiled_step_learns_the_same() -> None:
    def trained(*callbacks: Any) -> keras.Model:
        keras.utils.set_random_seed(0)
        blocks = [
            keras.Sequential([keras.layers.Dense(64, "tanh"), keras.layers.Dense(16, "tanh")])
            for _ in range(3)
        ]
        model = keras.Sequential([keras.Input((8,)), *blocks])
        model.compile("sgd", "mse", jit_compile=True)
        x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
        model.fit(x[:, :8], x, 4, 2, callbacks=[*callbacks], shuffle=False, verbose=0)
        return model

    ours = DynamicGradientCheckpointing(0.6)
    assert_same(weights(trained(ours)), weights(trained()), 1e-5)
    assert ours.plan_.spans


def test_the_hooks_of_the_checkpoint_are_where_they_are_looked_for() -> None:
    with torch.autograd.graph.saved_tensors_hooks(str, lambda x: x):
        pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(False)
    assert pack is str


def test_surroundings_of_a_call_are_restored() -> None:
    seen = []

    class Looks(keras.layers.Layer):
        def call(self, x: Any, training: bool | None = None) -> Any:
            seen.append(call_state.CallState([x]))
            with seen[-1].restored():
                inner = keras.layers.Dropout(0.5)
                seen.append(inner(keras.ops.ones((64,))))
            return x

    Looks()(keras.ops.ones((2,)), training=True)
    assert float(keras.ops.min(seen[1])) == 0.0
    assert not keras.src.backend.common.global_state.get_global_attribute(call_state.CONTEXT)
