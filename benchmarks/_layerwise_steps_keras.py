"""Worker: alternating `model.fit` steps, with and without `LayerwiseLRDecay`.

Run by `_layerwise_steps`, in a process of its own with `KERAS_BACKEND` set.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

from benchmarks._baton import Pause, alternate
from benchmarks._layerwise_steps import DECAY, Case, Shape, serve
from keras_ext import LayerwiseLRDecay

# JAX would compile a random draw for every shape; `vision_transformer` draws in numpy instead.
_PLAIN: dict[str, Any] = {"kernel_initializer": "zeros"}


class Block(layers.Layer):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__(**options)
        self.norm1 = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(heads, width // heads, **_PLAIN)
        self.norm2 = layers.LayerNormalization()
        self.up = layers.Dense(4 * width, activation="gelu", **_PLAIN)
        self.down = layers.Dense(width, **_PLAIN)

    def build(self, shape: tuple[int, ...]) -> None:
        self.norm1.build(shape)
        self.attention.build(shape, shape)
        self.norm2.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], self.up.units))

    def call(self, x: Any) -> Any:
        y = self.norm1(x)
        x = x + self.attention(y, y)
        return x + self.down(self.up(self.norm2(x)))


class PositionEmbedding(layers.Layer):
    def build(self, shape: tuple[int, ...]) -> None:
        self.embeddings = self.add_weight(shape=shape[1:], initializer="zeros")

    def call(self, x: Any) -> Any:
        return x + self.embeddings


def vision_transformer(shape: Shape) -> keras.Model:
    """The network of `benchmarks._networks` in Keras."""
    inputs = keras.Input((shape.image, shape.image, 3))
    x = layers.Conv2D(shape.width, shape.patch, shape.patch, name="patch_embed", **_PLAIN)(inputs)
    x = layers.Reshape((-1, shape.width))(x)
    x = PositionEmbedding(name="position_embedding")(x)
    for i in range(shape.blocks):
        x = Block(shape.width, shape.heads, name=f"block_{i}")(x)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization(name="norm")(x))
    model = keras.Model(inputs, layers.Dense(10, name="head", **_PLAIN)(x))
    generator = np.random.default_rng(0)
    model.set_weights([w + generator.normal(0, 0.02, w.shape) for w in model.get_weights()])
    return model


class StepBegins(keras.callbacks.Callback):
    """Calls `pause` where a step begins, and waits for its result where it ends."""

    def __init__(self, pause: Pause) -> None:
        super().__init__()
        self.pause = pause

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.pause()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        float(logs["loss"])  # JAX computes on while Python is ahead


class Repeat(keras.utils.PyDataset):
    """One batch, many times: loading data is not what is measured."""

    def __init__(self, batch: Any, times: int) -> None:
        super().__init__()
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return self.times

    def __getitem__(self, index: int) -> Any:
        return self.batch


class Fit:
    """One contestant: a network from a fixed seed, and how it is trained."""

    def __init__(
        self, shape: Shape, steps: int, callbacks: Sequence[keras.callbacks.Callback] = ()
    ) -> None:
        self.callbacks, self.steps = list(callbacks), steps
        self.model = vision_transformer(shape)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(keras.optimizers.AdamW(1e-4), loss)
        images = np.random.default_rng(0).normal(size=(shape.batch, shape.image, shape.image, 3))
        self.batch = images.astype("float32"), np.arange(shape.batch) % 10

    def __call__(self, pause: Pause) -> None:
        callbacks = [StepBegins(pause), *self.callbacks]
        self.model.fit(Repeat(self.batch, self.steps), verbose=0, callbacks=callbacks)


def same_weights(one: Fit, other: Fit) -> bool:
    pairs = zip(one.model.get_weights(), other.model.get_weights(), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def run(case: Case, steps: int, warmup: int, seed: int) -> dict[str, Any]:
    """Times of all contestants of a case."""
    decay = LayerwiseLRDecay(DECAY)
    total = warmup + steps + 1
    fits = {
        "bare": Fit(case.shape, total),
        "LayerwiseLRDecay": Fit(case.shape, total, [decay]),
    }
    if not case.smoke:  # a third trace takes its time
        fits["bare again"] = Fit(case.shape, total)
    runners = alternate(fits, steps, warmup, seed)
    if (found := len(decay.levels_)) != case.shape.blocks + 2:
        raise AssertionError(f"{found} levels instead of {case.shape.blocks + 2}")
    if same_weights(fits["bare"], fits["LayerwiseLRDecay"]):
        raise AssertionError("LayerwiseLRDecay learnt what the bare fit did")
    kept = type(decay).on_train_batch_end is keras.callbacks.Callback.on_train_batch_end
    return {
        "wall": {name: runner.wall for name, runner in runners.items()},
        "cpu": {name: runner.cpu for name, runner in runners.items()},
        "jit_compile": bool(fits["bare"].model.jit_compile),
        "keeps_asynchronous_dispatch": kept,
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    serve(run, sys.argv[1:])
