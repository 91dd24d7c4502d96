"""The tree that is read from a Keras model, and the levels that follow from it."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import layers

from keras_ext._layers import layers_from_model
from strategies.learning_rate import Layer, parameter_depths


def depths(model: keras.Model) -> dict[str, int]:
    """Depth of each layer that has parameters, by the names that lead to it."""
    by_name = parameter_depths(layers_from_model(model))
    by_layer: dict[str, set[int]] = {}
    for name, depth in by_name.items():
        by_layer.setdefault(name.rpartition("/")[0], set()).add(depth)
    assert all(len(found) == 1 for found in by_layer.values()), by_layer
    return {layer: found.pop() for layer, found in by_layer.items()}


def names(tree: Layer) -> list[str]:
    return [parameter.name for parameter in tree.all_parameters()]


def dense(name: str, units: int = 4) -> layers.Dense:
    return layers.Dense(units, name=name, use_bias=False)


class Block(layers.Layer):
    """A residual block, built on its first call."""

    def __init__(self, units: int = 4, **options: Any) -> None:
        super().__init__(**options)
        self.norm = layers.LayerNormalization(name="norm")
        self.attention = layers.MultiHeadAttention(2, 2, name="attention")
        self.expand = layers.Dense(2 * units, name="expand")
        self.project = layers.Dense(units, name="project")

    def call(self, x: Any) -> Any:
        x = x + self.attention(x, x)
        return x + self.project(self.expand(self.norm(x)))


class TestTree:
    def test_sequential(self) -> None:
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(3, name="a"), layers.BatchNormalization(name="n")]
        )
        tree = layers_from_model(model)
        assert tree.role == "list"
        assert [child.role for child in tree.children] == ["layer", "norm"]
        # What a norm counts is not made to be trained.
        assert names(tree) == ["a/kernel", "a/bias", "n/gamma", "n/beta"]
        assert [p.is_bias for p in tree.all_parameters()] == [False, True, False, False]
        assert [p.key for p in tree.all_parameters()] == [id(v) for v in model.trainable_variables]

    @pytest.mark.parametrize(
        ("layer", "role"),
        [
            (layers.BatchNormalization(), "norm"),
            (layers.GroupNormalization(2), "norm"),
            (layers.LayerNormalization(), "norm"),
            (layers.RMSNormalization(), "norm"),
            (layers.PReLU(), "norm"),
            (layers.SpectralNormalization(layers.Dense(4)), "layer"),
            (layers.TimeDistributed(layers.LayerNormalization()), "norm"),
            (layers.TimeDistributed(layers.Dense(4)), "layer"),
            (layers.Bidirectional(layers.LSTM(3)), "layer"),
            (layers.RNN(layers.StackedRNNCells([layers.GRUCell(3), layers.GRUCell(2)])), "layer"),
            (layers.SeparableConv1D(3, 2), "layer"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, layers.Layer) else value,
    )
    def test_each_of_keras_own_layers_is_one(self, layer: layers.Layer, role: str) -> None:
        model = keras.Sequential([keras.Input((5, 4)), layer])
        (child,) = layers_from_model(model).children
        assert (child.role, child.children) == (role, ())
        assert {p.key for p in child.parameters} == {id(v) for v in model.trainable_variables}

    def test_attention_is_one_layer_with_long_names(self) -> None:
        x = keras.Input((5, 4))
        model = keras.Model(x, layers.MultiHeadAttention(2, 2, name="mha")(x, x))
        (child,) = layers_from_model(model).children
        assert child.weight_layers == 1
        assert [p.name for p in child.parameters][:2] == ["mha/query/kernel", "mha/query/bias"]

    def test_embedding(self) -> None:
        model = keras.Sequential([keras.Input((5,)), layers.Embedding(7, 4, name="words")])
        assert layers_from_model(model).children[0].role == "embedding"

    def test_two_layers_of_one_name(self) -> None:
        class Twice(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = dense("same"), dense("same")

            def call(self, x: Any) -> Any:
                return self.second(self.first(x))

        model = Twice()
        model(keras.ops.ones((1, 4)))
        assert names(layers_from_model(model)) == ["same/kernel", "same:2/kernel"]

    def test_two_variables_of_one_name(self) -> None:
        class Own(layers.Layer):
            def build(self, shape: Any) -> None:
                self.v, self.w = self.add_weight((1,), name="w"), self.add_weight((1,), name="w")

            def call(self, x: Any) -> Any:
                return x * self.v + self.w

        model = keras.Sequential([keras.Input((4,)), Own(name="own")])
        assert names(layers_from_model(model)) == ["own/w", "own/w:2"]

    def test_variables_of_the_model_itself(self) -> None:
        class WithToken(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.head = dense("head")

            def build(self, shape: Any) -> None:
                self.token = self.add_weight((1, 4), name="cls_token")
                self.head.build(shape)

            def call(self, x: Any) -> Any:
                return self.head(x + self.token)

        model = WithToken()
        model.build((None, 4))
        assert names(layers_from_model(model)) == ["cls_token", "head/kernel"]
        assert parameter_depths(layers_from_model(model)) == {"cls_token": 0, "head/kernel": 1}

    def test_a_layer_that_knows_its_owner(self) -> None:
        class Child(layers.Layer):
            owner: Any = None

            def build(self, shape: Any) -> None:
                self.w = self.add_weight((1,), name="w")

            def call(self, x: Any) -> Any:
                return x * self.w

        class Owner(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.child = Child(name="child")

            def call(self, x: Any) -> Any:
                return self.child(x)

        model = Owner()
        model(keras.ops.ones((1, 4)))
        vars(model.child)["owner"] = model
        model.child._layers.append(model)
        assert names(layers_from_model(model)) == ["child/w"]

    def test_layers_that_know_all_earlier_ones(self) -> None:
        class Knows(layers.Layer):
            def __init__(self, earlier: list[Any], **options: Any) -> None:
                super().__init__(**options)
                self.earlier, self.own = list(earlier), dense("own")

            def call(self, x: Any) -> Any:
                return self.own(x)

        blocks: list[Any] = []
        for i in range(12):
            blocks.append(Knows(blocks, name=f"block_{i}"))
        model = keras.Sequential([keras.Input((4,)), *blocks, dense("head")])
        tree = layers_from_model(model)
        assert len(list(tree.walk())) < 12**2 * 4
        assert {p.key for p in tree.all_parameters()} == {id(v) for v in model.trainable_variables}

    def test_seeds_and_counters_are_no_parameters(self) -> None:
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dropout(0.5, seed=1), layers.GaussianNoise(1.0), dense("a")]
        )
        assert names(layers_from_model(model)) == ["a/kernel"]


class TestLevels:
    def test_flat_network(self) -> None:
        model = keras.Sequential([keras.Input((4,)), dense("a"), dense("b"), dense("c")])
        assert depths(model) == {"a": 0, "b": 1, "c": 2}

    def test_freezing_shifts_nothing(self) -> None:
        model = keras.Sequential([keras.Input((4,)), dense("a"), dense("b"), dense("c")])
        before = depths(model)
        for frozen in ("c", "a", "b"):
            model.get_layer(frozen).trainable = False
            assert depths(model) == before

    @pytest.mark.parametrize("count", [2, 4])
    def test_functional_blocks(self, count: int) -> None:
        inputs = keras.Input((5, 4))
        x = dense("stem")(inputs)
        for i in range(count):
            x = Block(name=f"layer_{i}")(x)
        x = layers.LayerNormalization(name="last_norm")(x)
        model = keras.Model(inputs, dense("b")(dense("a")(layers.Flatten()(x))))
        found = depths(model)
        assert found["stem"] == 0
        for i in range(count):
            parts = {depth for name, depth in found.items() if name.startswith(f"layer_{i}/")}
            assert parts == {i + 1}
        assert found["last_norm"] == found["a"] == found["b"] == count + 1

    @pytest.mark.parametrize("held", ["list", "attributes", "nested lists", "dict"])
    def test_subclassed_blocks(self, held: str) -> None:
        class Transformer(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.embed = layers.Embedding(7, 4, name="embed")
                blocks = [Block(name=f"block_{i}") for i in range(4)]
                if held == "list":
                    self.blocks = blocks
                elif held == "nested lists":
                    self.stages = [blocks[:2], blocks[2:]]
                elif held == "dict":
                    self.blocks = {block.name: block for block in blocks}
                else:
                    self.b0, self.b1, self.b2, self.b3 = blocks
                self.order = tuple(blocks)
                self.norm = layers.LayerNormalization(name="norm")
                self.head = dense("head")

            def call(self, x: Any) -> Any:
                x = self.embed(x)
                for block in self.order:
                    x = block(x)
                return self.head(self.norm(x))

        model = Transformer()
        model(keras.ops.zeros((1, 5), "int32"))
        found = depths(model)
        expected = {"embed": 0, "block_0": 1, "block_1": 2, "block_2": 3, "block_3": 4}
        expected |= {"norm": 5, "head": 5}
        assert {name.split("/")[0]: depth for name, depth in found.items()} == expected

    def test_two_sequential_halves_count_layer_by_layer_on_every_backend(self) -> None:
        """What a backend keeps in the same object (torch's `_modules`) is no list of the user's."""

        class Halves(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.stem = dense("stem")
                self.lower = keras.Sequential([dense("l0"), dense("l1")])
                self.upper = keras.Sequential([dense("u0"), dense("u1")])
                self.out = dense("out")

            def call(self, x: Any) -> Any:
                return self.out(self.upper(self.lower(self.stem(x))))

        model = Halves()
        model(keras.ops.ones((1, 4)))
        assert list(depths(model).values()) == [0, 1, 2, 3, 4, 5]

    def test_backbone_inside_a_model(self) -> None:
        inputs = keras.Input((5, 4))
        x = dense("stem")(inputs)
        for i in range(3):
            x = Block(name=f"block_{i}")(x)
        backbone = keras.Model(inputs, x, name="backbone")
        for wrapped in (backbone, keras.Sequential([backbone], name="outer")):
            model = keras.Sequential([keras.Input((5, 4)), wrapped, dense("head")])
            found = depths(model)
            prefix = "backbone/" if wrapped is backbone else "outer/backbone/"
            assert found[f"{prefix}stem"] == 0
            assert found[f"{prefix}block_2/project"] == 3
            assert found["head"] == 4

    def test_backbone_over_time(self) -> None:
        inputs = keras.Input((4,))
        inner = keras.Model(inputs, dense("b")(dense("a")(inputs)), name="inner")
        model = keras.Sequential(
            [keras.Input((3, 4)), layers.TimeDistributed(inner, name="over_time"), dense("head")]
        )
        assert depths(model) == {"over_time/inner/a": 0, "over_time/inner/b": 1, "head": 2}

    def test_shared_layer_counts_at_its_deepest_use(self) -> None:
        shared, inputs = dense("shared"), keras.Input((4,))
        model = keras.Model(inputs, dense("head")(shared(dense("middle")(shared(inputs)))))
        assert depths(model) == {"middle": 0, "shared": 1, "head": 2}

    def test_siamese_branches_are_not_counted_twice(self) -> None:
        inputs = keras.Input((4,))
        encoder = keras.Model(inputs, dense("b")(dense("a")(inputs)), name="encoder")
        left, right = keras.Input((4,)), keras.Input((4,))
        both = layers.Concatenate()([encoder(left), encoder(right)])
        model = keras.Model([left, right], dense("head")(both))
        assert depths(model) == {"encoder/a": 0, "encoder/b": 1, "head": 2}

    def test_tied_output_projection_is_the_head(self) -> None:
        words = layers.ReversibleEmbedding(7, 4, name="words")
        inputs = keras.Input((5,))
        x = layers.Embedding(5, 4, name="places")(inputs) + words(inputs)
        for i in range(2):
            x = Block(name=f"block_{i}")(x)
        found = depths(keras.Model(inputs, words(x, reverse=True)))
        assert found["places"] == 0
        assert found["block_1/project"] == 2
        assert found["words"] == 3

    def test_layer_outside_the_graph_is_not_lost(self) -> None:
        class WithProjection(keras.Model):
            def __init__(self) -> None:
                inputs = keras.Input((4,))
                super().__init__(inputs, dense("b")(dense("a")(inputs)))
                self.projection = dense("projection")
                self.projection.build((None, 4))

        assert depths(WithProjection()) == {"a": 0, "b": 1, "projection": 2}
