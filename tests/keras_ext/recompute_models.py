"""Models with repeated blocks, of every kind that Keras has, and data for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

LENGTH, WIDTH, ROWS = 8, 16, 8


class Block(layers.Layer):
    """A pre-norm transformer block with dropout."""

    def __init__(self, dropout: float = 0.2, **options: Any) -> None:
        super().__init__(**options)
        self.norm1, self.norm2 = layers.LayerNormalization(), layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, WIDTH // 2, dropout=dropout)
        self.up, self.down = layers.Dense(4 * WIDTH, "gelu"), layers.Dense(WIDTH)
        self.drop = layers.Dropout(dropout)

    def build(self, shape: Any) -> None:
        for norm in (self.norm1, self.norm2):
            norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * WIDTH))
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x: Any, training: bool | None = None) -> Any:
        y = self.norm1(x)
        x = x + self.attention(y, y) * self.scale
        return x + self.drop(self.down(self.up(self.norm2(x))), training=training)


class Simple(layers.Layer):
    """A block without normalization and dropout, whose inside can be another."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.up, self.down = layers.Dense(4 * WIDTH, "silu"), layers.Dense(WIDTH)

    def call(self, x: Any) -> Any:
        return x + self.down(self.inner(x))

    def inner(self, x: Any) -> Any:
        return self.up(x)


class Sub(keras.Model):
    """A subclassed model that hands `training` on to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = layers.Dense(WIDTH)
        self.blocks = [Block(name=f"block_{i}") for i in range(3)]
        self.head = layers.Dense(1)

    def call(self, x: Any, training: bool | None = None) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def transformer() -> keras.Model:
    x = inputs = keras.Input((LENGTH, 4))
    x = layers.Dense(WIDTH)(x)
    for i in range(3):
        x = Block(name=f"block_{i}")(x)
    return keras.Model(inputs, layers.Dense(1)(layers.LayerNormalization()(x)))


def _convolutions(i: int) -> keras.Model:
    return keras.Sequential(
        [
            layers.Conv2D(8, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.SpatialDropout2D(0.1),
            layers.Conv2D(8, 3, padding="same"),
            layers.BatchNormalization(),
        ],
        name=f"block_{i}",
    )


def convolutional() -> keras.Model:
    x = inputs = keras.Input((LENGTH, 4))
    x = layers.Reshape((LENGTH, 4, 1))(x)
    x = layers.Conv2D(8, 3, padding="same")(x)
    for i in range(3):
        x = layers.ReLU()(layers.Add()([x, _convolutions(i)(x)]))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def _mlp(i: int) -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH))
    x = layers.Dense(4 * WIDTH, "gelu")(inputs)
    x = layers.Dropout(0.1)(layers.Dense(WIDTH, kernel_regularizer="l2")(x))
    x = layers.ActivityRegularization(l2=1e-3)(x)
    return keras.Model(inputs, layers.LayerNormalization()(inputs + x), name=f"block_{i}")


def residual() -> keras.Model:
    x = inputs = keras.Input((LENGTH, 4))
    x = layers.Dense(WIDTH)(x)
    for i in range(3):
        x = _mlp(i)(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def sequential() -> keras.Model:
    blocks = [
        keras.Sequential(
            [layers.Dense(4 * WIDTH, "tanh"), layers.Dropout(0.2), layers.Dense(WIDTH, "tanh")],
            name=f"block_{i}",
        )
        for i in range(3)
    ]
    return keras.Sequential(
        [keras.Input((LENGTH, 4)), layers.Dense(WIDTH), *blocks, layers.Dense(1)]
    )


def subclassed() -> keras.Model:
    model = Sub()
    model(np.zeros((1, LENGTH, 4), "float32"))
    return model


def frozen() -> keras.Model:
    model = transformer()
    for i in (0, 1):
        model.get_layer(f"block_{i}").trainable = False
    return model


def masked() -> keras.Model:
    x = inputs = keras.Input((LENGTH, 4))
    x = layers.Masking()(x)
    x = layers.Dense(WIDTH)(x)
    for i in range(3):
        x = layers.Bidirectional(
            layers.LSTM(WIDTH // 2, return_sequences=True, dropout=0.2), name=f"block_{i}"
        )(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def shared() -> keras.Model:
    block, x = Block(name="block_0"), keras.Input((LENGTH, 4))
    inputs, x = x, layers.Dense(WIDTH)(x)
    for layer in (block, Block(name="block_1"), block):
        x = layer(x)
    return keras.Model(inputs, layers.Dense(1)(x))


MODELS: dict[str, Callable[[], keras.Model]] = {
    made.__name__: made
    for made in (
        transformer, convolutional, residual, sequential, subclassed, frozen, masked, shared
    )
}  # fmt: skip


def built(kind: str, **options: Any) -> keras.Model:
    """A model, built and compiled, with the same weights and seeds at every call."""
    keras.utils.set_random_seed(0)
    model = MODELS[kind]()
    # Adam makes much of rounding where a gradient is zero, as that of biases of keys.
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    compiled = keras.backend.backend() == "jax" and not options.get("run_eagerly")
    model.compile(optimizer, "mse", **{"jit_compile": compiled} | options)
    return model


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, the last of which are masked, and targets."""
    x = np.random.default_rng(0).normal(size=(rows, LENGTH, 4)).astype("float32")
    x[:, -2:] = 0
    return x, x[:, :1, :1] * np.ones((1, LENGTH, 1), "float32")
