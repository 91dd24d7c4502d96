"""Blocks that are found in flat functional models, by name and by graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers

from tests.keras_ext.test_layers import dense, depths


def conv(name: str | None = None, filters: int = 4, **options: Any) -> layers.Conv2D:
    return layers.Conv2D(filters, 3, padding="same", name=name, **options)


class AddPlaces(layers.Layer):
    """Adds a learned embedding of the position."""

    def build(self, shape: Any) -> None:
        self.table = layers.Embedding(5, 4, name="table")
        self.table.build((5,))

    def call(self, x: Any) -> Any:
        return x + self.table(keras.ops.arange(5))


def transformer(blocks: int, post_norm: bool = False, add: Callable[..., Any] | None = None) -> Any:
    """As in keras.io/examples: every layer is called in one long function, none has a name."""
    add = add or (lambda x, y: layers.Add()([x, y]))
    inputs = keras.Input((5, 4))
    x = layers.Dense(4, name="patches")(inputs)
    x = AddPlaces(name="places")(x)
    for i in range(blocks):
        y = x if post_norm else layers.LayerNormalization(name=f"norm{i}a")(x)
        y = layers.MultiHeadAttention(2, 2, name=f"attention{i}")(y, y)
        x = add(x, layers.Dropout(0.1)(y))
        if post_norm:
            x = layers.LayerNormalization(name=f"norm{i}a")(x)
        y = x if post_norm else layers.LayerNormalization(name=f"norm{i}b")(x)
        y = layers.Dense(8, activation="gelu", name=f"expand{i}")(y)
        x = add(x, layers.Dense(4, name=f"project{i}")(layers.Dropout(0.1)(y)))
        if post_norm:
            x = layers.LayerNormalization(name=f"norm{i}b")(x)
    if not post_norm:
        x = layers.LayerNormalization(name="last_norm")(x)
    return inputs, layers.GlobalAveragePooling1D()(x)


def by_number(found: dict[str, int], i: int) -> set[int]:
    """Depths of the layers of block `i`."""
    return {depth for name, depth in found.items() if re.match(rf"[a-z]+{i}[ab]?(/|$)", name)}


class TestByGraph:
    @pytest.mark.parametrize("blocks", [2, 3])
    def test_attention_takes_its_mlp_along(self, blocks: int) -> None:
        inputs, x = transformer(blocks)
        found = depths(keras.Model(inputs, dense("out")(layers.Dense(8, name="features")(x))))
        assert found["patches"] == found["places/table"] == 0
        assert [by_number(found, i) for i in range(blocks)] == [{i + 1} for i in range(blocks)]
        assert found["last_norm"] == found["features"] == found["out"] == blocks + 1

    def test_sums_written_with_an_operator(self) -> None:
        inputs, x = transformer(2, add=lambda x, y: x + y)
        found = depths(keras.Model(inputs, dense("out")(x)))
        assert [by_number(found, i) for i in range(2)] == [{1}, {2}]

    def test_norms_behind_the_sums(self) -> None:
        inputs, x = transformer(3, post_norm=True)
        found = depths(keras.Model(inputs, dense("out")(x)))
        assert by_number(found, 1) == {2}
        assert found["out"] == 4

    def test_mask_that_is_read_everywhere(self) -> None:
        inputs, mask = keras.Input((5, 4)), keras.Input((5,), dtype="bool")
        x = dense("stem")(inputs)
        for i in range(3):
            attention = layers.MultiHeadAttention(2, 2, name=f"attention{i}")
            x = x + attention(x, x, attention_mask=keras.ops.expand_dims(mask, 1))
            x = x + layers.Dense(4, name=f"project{i}")(x)
        found = depths(keras.Model([inputs, mask], dense("out")(x)))
        assert [by_number(found, i) for i in range(3)] == [{1}, {2}, {3}]

    def test_residual_convolutions(self) -> None:
        inputs = keras.Input((8, 8, 3))
        x = layers.BatchNormalization()(conv("stem")(inputs))
        for i in range(3):
            y = conv(f"second{i}")(layers.ReLU()(conv(f"first{i}")(x)))
            shortcut = layers.Conv2D(4, 1, name=f"shortcut{i}")(x) if i else x
            x = layers.ReLU()(layers.Add()([shortcut, y]))
        found = depths(keras.Model(inputs, dense("out")(layers.GlobalMaxPooling2D()(x))))
        assert found["stem"] == 0
        assert [by_number(found, i) for i in range(3)] == [{1}, {2}, {3}]
        assert found["out"] == 4

    def test_a_chain_has_no_blocks(self) -> None:
        inputs = keras.Input((8, 8, 3))
        x = conv("c2")(layers.MaxPooling2D()(conv("c1")(conv("c0")(inputs))))
        found = depths(keras.Model(inputs, dense("out")(layers.Flatten()(x))))
        assert found == {"c0": 0, "c1": 1, "c2": 2, "out": 3}

    def test_one_skip_over_everything_is_no_block(self) -> None:
        inputs = keras.Input((8, 8, 3))
        a = conv("a")(inputs)
        b = conv("b")(layers.MaxPooling2D()(a))
        c = conv("c")(layers.UpSampling2D()(b))
        model = keras.Model(inputs, conv("d")(layers.Concatenate()([a, c])))
        assert depths(model) == {"a": 0, "b": 1, "c": 2, "d": 3}

    def test_two_towers_are_no_block(self) -> None:
        left, right = keras.Input((4,)), keras.Input((4,))
        both = layers.Concatenate()(
            [dense("l1")(dense("l0")(left)), dense("r1")(dense("r0")(right))]
        )
        found = depths(keras.Model([left, right], dense("out")(dense("both")(both))))
        assert max(found[name] for name in ("l0", "r0")) < min(found[n] for n in ("l1", "r1"))
        assert found["both"] + 1 == found["out"]


class TestByName:
    def test_names_beat_the_graph(self) -> None:
        inputs = keras.Input((8, 8, 3))
        x = conv("stem")(inputs)
        for i in range(2):
            for j in range(2):
                x = layers.Add()([x, conv(f"block{i}_conv{j}")(conv(f"block{i}_pre{j}")(x))])
        found = depths(keras.Model(inputs, dense("out")(layers.Flatten()(x))))
        assert {name.split("_")[0]: depth for name, depth in found.items()} == {
            "stem": 0,
            "block0": 1,
            "block1": 2,
            "out": 3,
        }

    def test_nameless_shortcut_belongs_to_the_block_it_leads_around(self) -> None:
        inputs = keras.Input((8, 8, 3))
        x = conv("stem")(inputs)
        for i in range(2):
            y = conv(f"block{i}_b")(conv(f"block{i}_a")(x))
            x = layers.Add()([layers.Conv2D(4, 1, name=f"shortcut{i}")(x), y])
        found = depths(keras.Model(inputs, dense("out")(layers.Flatten()(x))))
        assert (found["shortcut0"], found["shortcut1"]) == (1, 2)

    def test_plain_layers_called_block(self) -> None:
        model = keras.Sequential(
            [keras.Input((4,)), dense("block1"), dense("block2"), dense("block3")]
        )
        assert depths(model) == {"block1": 0, "block2": 1, "block3": 2}


def built_without_values(name: str) -> keras.Model:
    """A model of `keras.applications`; the time goes into initial values, which nobody reads."""
    with keras.StatelessScope(initialize_variables=False):
        model = getattr(keras.applications, name)(weights=None)
    keras.utils.clear_session()  # else the next stateless scope makes up for the values
    return model


# Names of the stem, of the first and last block, and of the head.
NETWORKS = {
    "ResNet50": (["conv1_conv", "conv1_bn"], "conv2_block1", "conv5_block3", ["predictions"], 16),
    "MobileNetV2": (
        ["Conv1", "bn_Conv1"],
        "expanded_conv",
        "block_16",
        ["Conv_1", "Conv_1_bn", "predictions"],
        17,
    ),
    "VGG16": ([], "block1", "block5", ["fc1", "fc2", "predictions"], 5),
    "EfficientNetB0": (
        ["stem_conv", "stem_bn"],
        "block1a",
        "block7a",
        ["top_conv", "top_bn", "predictions"],
        16,
    ),
    "ResNet50V2": (["conv1_conv"], "conv2_block1", "conv5_block3", ["post_bn", "predictions"], 16),
    "Xception": ([], "block1_", "block14", ["predictions"], 14),
    "MobileNetV3Small": (
        ["conv", "conv_bn"],
        "expanded_conv_depthwise",
        "expanded_conv_10",
        ["conv_1", "conv_1_bn", "conv_2", "logits"],
        11,
    ),
    "DenseNet121": (
        ["conv1_conv", "conv1_bn"],
        "conv2_block1_",
        "conv5_block16",
        ["predictions"],
        61,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_applications(name: str) -> None:
    stem, first, last, head, levels = NETWORKS[name]
    found = depths(built_without_values(name))
    begin = 1 if stem else 0
    assert [layer for layer, depth in found.items() if depth == 0 and begin] == stem
    assert {d for layer, d in found.items() if layer.startswith(first)} == {begin}
    assert {d for layer, d in found.items() if layer.startswith(last)} == {begin + levels - 1}
    top = begin + levels
    assert {layer for layer, depth in found.items() if depth == top} >= set(head)
    # Blocks rise one by one, in the order in which they are applied.
    order = list(dict.fromkeys(found.values()))
    assert order == list(range(top + 1))


@pytest.mark.parametrize(
    ("name", "levels"), [("InceptionV3", 13), ("ConvNeXtTiny", 23), ("EfficientNetV2B0", 22)]
)
def test_levels_of_other_applications(name: str, levels: int) -> None:
    assert set(depths(built_without_values(name)).values()) == set(range(levels))
