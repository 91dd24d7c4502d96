"""The tree of layers that `strategies` reasons about, read from a Keras model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import keras

from keras_ext._blocks import group_blocks
from keras_ext.backends.internals import (
    is_functional,
    layer_lists,
    own_variables,
    sublayers,
)
from strategies.learning_rate import Layer, Parameter
from strategies.learning_rate.structure import Role, is_norm_kind

_NORMS = (
    keras.layers.BatchNormalization,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.Normalization,
    keras.layers.UnitNormalization,
)


def layers_from_model(model: keras.Model) -> Layer:
    """Read the tree of a model: functional, sequential, subclassed, or any nesting of them.

    A parameter is called by the names of the layers above it, without the model's own:
    `"encoder/dense_1/kernel"`. Layers of a functional model stand in the order in which they are
    last used. Only what was made to be trained is listed, frozen or not.

    Args:
        model: A built Keras 3 model.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="head")])
        >>> [p.name for p in layers_from_model(model).all_parameters()]
        ['head/kernel', 'head/bias']
    """
    return _grow("", model, above=frozenset(), beside=frozenset())


def _grow(
    path: str,
    layer: keras.Layer,
    above: frozenset[int],
    beside: frozenset[int],
    known: bool = False,
) -> Layer:
    """The tree of a layer.

    A layer may hold a reference to the one that it is part of (`above`), or to others that stand
    beside it, or beside those above. Such a known layer is listed here too, but what it refers to
    in turn is not: from layers that know all earlier ones would grow an exponential tree.
    """
    prefix = f"{path}/" if path else ""
    above |= {id(layer)}
    below = [
        child
        for child in sublayers(layer)
        if id(child) not in above and not (known and id(child) in beside)
    ]
    paths = {
        id(child): f"{prefix}{name}"
        for child, name in zip(below, _unique(child.name for child in below), strict=True)
    }
    around = beside | set(paths)
    trees = {
        id(child): _grow(paths[id(child)], child, above, around, known or id(child) in beside)
        for child in below
    }
    trees = {key: tree for key, tree in trees.items() if any(tree.all_parameters())}
    children: Iterable[Layer]
    if is_functional(layer):
        children = group_blocks(layer, prefix, trees)
    else:
        children = _children(prefix, layer, trees)
    variables = own_variables(layer)
    parameters = tuple(
        Parameter(f"{prefix}{name}", key=id(variable), is_bias=name.endswith("bias"))
        for variable, name in zip(variables, _unique(v.name for v in variables), strict=True)
    )
    tree = Layer(path, type(layer).__name__, "layer", parameters, tuple(children))
    tree = replace(tree, role=_role(layer, tree))
    return _as_one(tree) if _is_built_in(layer) else tree


def _unique(names: Iterable[str]) -> list[str]:
    """Names with `:2`, `:3` … behind those that come again."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}:{seen[name]}")
    return unique


def _children(prefix: str, layer: keras.Layer, trees: dict[int, Layer]) -> Iterator[Layer]:
    """Trees of the sub-layers, those that are held in one list as one node."""
    lists = {} if isinstance(layer, keras.Sequential) else layer_lists(layer)
    held: dict[int, Layer] = {}
    for attribute, value in lists.items():
        if node := _list_node(f"{prefix}{attribute}", value, trees):
            held |= {key: node for key, tree in trees.items() if tree in set(node.walk())}
    done: set[int] = set()
    for key, tree in trees.items():
        node = held.get(key, tree)
        if id(node) not in done:
            done.add(id(node))
            yield node


def _list_node(path: str, value: Any, trees: dict[int, Layer]) -> Layer | None:
    items = value.values() if isinstance(value, Mapping) else value
    children = []
    for i, item in enumerate(items):
        if isinstance(item, (list, tuple, Mapping)):
            child = _list_node(f"{path}/{i}", item, trees)
        else:
            child = trees.get(id(item))
        if child is not None and child not in children:
            children.append(child)
    return Layer(path, "list", "list", children=tuple(children)) if children else None


def _role(layer: keras.Layer, tree: Layer) -> Role:
    if isinstance(layer, keras.Sequential) or is_functional(layer):
        return "list"
    if isinstance(layer, keras.layers.Embedding):
        return "embedding"
    is_norm = isinstance(layer, _NORMS) or is_norm_kind(type(layer).__name__)
    # SpectralNormalization wraps the layer whose kernel it normalises.
    return "norm" if is_norm and not tree.children else "layer"


def _is_built_in(layer: keras.Layer) -> bool:
    """Whether it is one of Keras' own layers, as attention or a recurrent cell, all through."""
    ours = type(layer).__module__.startswith("keras.") and not isinstance(layer, keras.Model)
    return ours and all(map(_is_built_in, sublayers(layer)))


def _as_one(tree: Layer) -> Layer:
    """One layer instead of its parts: projections of one attention share a level."""
    if not tree.children:
        return tree
    roles = {child.role for child in tree.walk() if child.parameters}
    role = roles.pop() if len(roles) == 1 else "layer"
    return Layer(tree.name, tree.kind, role, tuple(tree.all_parameters()))
