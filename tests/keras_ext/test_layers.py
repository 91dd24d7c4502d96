"""Levels of real Keras models, the same on every backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import applications, layers

from keras_ext._layers import layers_from_model
from strategies.learning_rate import parameter_depths


def depths(model: keras.Model) -> dict[str, int]:
    return parameter_depths(layers_from_model(model))


def by_layer(model: keras.Model) -> dict[str, int]:
    return {name.rsplit("/", 1)[0]: depth for name, depth in depths(model).items()}


# Name of the stem, of the blocks in order, and of the head; blocks counted in the papers.
ZOO = [
    (
        lambda: applications.ResNet50(weights=None, input_shape=(32, 32, 3)),
        "conv1_conv",
        [
            f"conv{s}_block{b}_"
            for s, n in ((2, 3), (3, 4), (4, 6), (5, 3))
            for b in range(1, n + 1)
        ],
        "predictions",
    ),
    (
        lambda: applications.MobileNetV2(weights=None, alpha=0.35, input_shape=(32, 32, 3)),
        "Conv1",
        ["expanded_conv_", *(f"block_{b}_" for b in range(1, 17))],
        "predictions",
    ),
    pytest.param(
        lambda: applications.EfficientNetB0(weights=None, input_shape=(32, 32, 3)),
        "stem_conv",
        [f"block{s}{b}_" for s, n in enumerate((1, 2, 2, 3, 3, 4, 1), start=1) for b in "abcd"[:n]],
        "predictions",
        marks=pytest.mark.matrix,
    ),
]


@pytest.mark.parametrize(("make", "stem", "blocks", "head"), ZOO)
def test_applications(make: Any, stem: str, blocks: list[str], head: str) -> None:
    found = by_layer(make())
    short = {name.rsplit("/", 1)[-1]: depth for name, depth in found.items()}
    assert short[stem] == 0
    for level, block in enumerate(blocks, start=1):
        assert {d for name, d in short.items() if name.startswith(block)} == {level}, block
    assert short[head] == len(blocks) + 1 == max(short.values())


class Block(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, 4)
        self.up, self.down = layers.Dense(16), layers.Dense(8)

    def call(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x), x)
        return x + self.down(self.up(x))


class Transformer(keras.Model):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.classify = layers.Dense(2, name="classifier")
        self.embed = layers.Embedding(10, 8, name="tokens")
        self.blocks = [Block(name=f"block_{i}") for i in range(depth)]
        self.norm = layers.LayerNormalization(name="final_norm")

    def call(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.classify(self.norm(x)[:, 0])


def test_subclassed_transformer() -> None:
    model = Transformer()
    model(np.zeros((1, 4), int))
    found = depths(model)
    level = {
        "tokens": {0},
        "block_0": {1},
        "block_1": {2},
        "block_2": {3},
        "final_norm": {4},
        "classifier": {4},
    }
    for part, expected in level.items():
        assert {d for name, d in found.items() if part in name} == expected, part


def test_two_sequential_halves_count_layer_by_layer_on_every_backend() -> None:
    """What a backend keeps in the same object (torch's `_modules`) is no list of the user's."""

    class Halves(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.stem = layers.Dense(4)
            self.lower = keras.Sequential([layers.Dense(4), layers.Dense(4)])
            self.upper = keras.Sequential([layers.Dense(4), layers.Dense(4)])
            self.out = layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.out(self.upper(self.lower(self.stem(x))))

    model = Halves()
    model(np.ones((1, 4)))
    assert list(depths(model).values()) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_nested_backbone_with_a_new_head() -> None:
    backbone = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="one"), layers.Dense(4, name="two")], name="body"
    )
    model = keras.Sequential([keras.Input((4,)), backbone, layers.Dense(2, name="head")])
    assert by_layer(model) == {"body/one": 0, "body/two": 1, "head": 2}
    backbone.trainable = False
    assert by_layer(model) == {"body/one": 0, "body/two": 1, "head": 2}


def test_a_shared_layer_counts_at_its_last_use() -> None:
    inputs = keras.Input((4,))
    shared = layers.Dense(4, name="shared")
    x = layers.Dense(4, name="middle")(shared(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="head")(shared(x)))
    found = by_layer(model)
    assert found["middle"] < found["shared"] < found["head"]


def test_every_trainable_variable_is_listed_once_with_a_unique_name() -> None:
    model = Transformer()
    model(np.zeros((1, 4), int))
    parameters = list(layers_from_model(model).all_parameters())
    assert {p.key for p in parameters} == {id(v) for v in model.trainable_variables}
    assert len({p.name for p in parameters}) == len(parameters) == len(model.trainable_variables)
