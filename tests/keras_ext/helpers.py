"""Tiny models and data, and a reference that knows nothing of this package."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras import layers

DECAY = 0.5
LEVELS = {"a": 0.25, "b": 0.5, "c": 1.0}  # of `network`, at this decay
ROWS, BATCH = 16, 8
STEPS = ROWS // BATCH  # per epoch

BACKEND = keras.backend.backend()


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets that are the same at every call."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return x, (x[:, :1] * x[:, 1:2] + 0.5).astype("float32")


def network() -> keras.Model:
    """Three layers, each a level, with the same weights at every call."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, activation="tanh", use_bias=False, name="a"),
            layers.Dense(5, activation="tanh", name="b"),
            layers.Dense(1, use_bias=False, name="c", dtype="float32"),
        ]
    )


def fit(
    model: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 3, **options: Any
) -> keras.callbacks.History:
    """Fit without shuffling, silently."""
    x, y = data()
    arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **arguments)


@contextmanager
def warned(match: str) -> Iterator[None]:
    """`pytest.warns`, which would give back what the configuration lets pass, as an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    assert [w for w in caught if re.search(match, str(w.message))], list(map(str, caught))


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    """Values of all variables, by path."""
    values = (keras.ops.convert_to_numpy(v) for v in model.weights)
    return {v.path: np.array(w) for v, w in zip(model.weights, values, strict=True)}


def assert_same(
    actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], rtol: float = 1e-6
) -> None:
    """Equal to a few units in the last place of the largest weight of each variable."""
    for (name, a), e in zip(actual.items(), expected.values(), strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * np.abs(e).max(), err_msg=name)


class ByLayer(keras.optimizers.MultiOptimizer):
    """One plain optimizer for each layer of `network`, at the rate that its layer should have.

    Args:
        make: Builds an optimizer from the factor on its rate.
        factors: Factor by layer.
        clip_all: Norm to which the gradients of all layers together are clipped.
    """

    def __init__(
        self,
        make: Callable[[float], keras.Optimizer],
        factors: Mapping[str, float],
        clip_all: float | None = None,
    ) -> None:
        rest = make(1.0)
        by_path = {f"(.*/)?{layer}/.*": make(factor) for layer, factor in factors.items()}
        super().__init__(keras.optimizers.OptimizerMap(rest, by_path))
        self.clip_all = clip_all

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if self.clip_all is not None:
            squares = [keras.ops.sum(keras.ops.square(g)) for g in grads]
            norm = keras.ops.sqrt(sum(squares))
            scale = keras.ops.minimum(1.0, self.clip_all / norm)
            grads = [g * scale for g in grads]
        super().apply(grads, trainable_variables)
