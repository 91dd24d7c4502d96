"""Train a network on digits with half of its activations, in Keras.

Run it with `python -m examples.gradient_checkpointing_keras`, on the backend of your choice
(`KERAS_BACKEND=jax python -m ...`).
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from examples.digits import load
from keras_ext import DynamicGradientCheckpointing


def block(width: int, name: str) -> keras.Model:
    """Two convolutions with batch normalization and dropout."""
    return keras.Sequential(
        [
            layers.Conv2D(width, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(width, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Dropout(0.1),
        ],
        name=name,
    )


def network(width: int = 16, depth: int = 6) -> keras.Model:
    """Built and compiled."""
    keras.utils.set_random_seed(0)
    images = keras.Input((8, 8, 1))
    x = layers.Conv2D(width, 3, padding="same")(images)
    for i in range(depth):
        x = layers.ReLU()(layers.Add()([x, block(width, f"block_{i}")(x)]))
    model = keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    return model


def fit(callbacks: list) -> keras.Model:
    known, _, _ = load()
    model = network()
    model.fit(known.x[:512, ..., None], known.y[:512], 64, callbacks=callbacks, verbose=0)
    return model


def run() -> tuple[float, DynamicGradientCheckpointing]:
    """Train with and without; by how much the weights differ at most, and the callback."""
    half = DynamicGradientCheckpointing(memory_budget=0.5)
    plain, ours = (fit(callbacks).get_weights() for callbacks in ([], [half]))
    return max(float(np.abs(a - b).max()) for a, b in zip(plain, ours, strict=True)), half


def main() -> None:
    difference, half = run()
    print(half.report_.explain(5))
    print(f"the weights differ from those of the plain run by {difference:.1e}")


if __name__ == "__main__":
    main()
