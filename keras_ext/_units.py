"""Which parts of a model are run again as one: its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_ext.backends.internals import is_functional, layer_lists, sublayers

Kind = type[keras.Layer] | str
# An element of a stack that holds a stack of its own is divided from this share of all layers on;
# what stands alone, from the other.
_ELEMENT, _ALONE = 1 / 8, 1 / 2


def units_of(model: keras.Model) -> dict[str, keras.Layer]:
    """The blocks of a model, by name; none inside another.

    Elements of its stacks (a list, a nested model or several layers of one class) and what stands
    beside them, as far as they have layers of their own: to run a single layer again saves next to
    nothing, as it needs its input and what follows needs its output.

    Args:
        model: With its layers.

    Example:
        >>> import keras
        >>> def block():
        ...     return keras.Sequential([keras.layers.Dense(4), keras.layers.ReLU()])
        >>> model = keras.Sequential([keras.Input((4,)), block(), block(), keras.layers.Dense(1)])
        >>> len(units_of(model))
        2
    """
    return _apart(_Search(model).inside("", model))


def chosen(model: keras.Model, kinds: Sequence[Kind]) -> dict[str, keras.Layer]:
    """The layers of some classes, or with some names; none inside another.

    Args:
        model: With its layers.
        kinds: Classes, names of layers, and paths: names of the layers that lead to one.
    """
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    found = (
        (path, layer)
        for path, layer in _walk("", model)
        if isinstance(layer, classes) or layer.name in kinds or path in kinds
    )
    return _apart(found)


def names_in(model: keras.Model) -> list[str]:
    """Names of the layers of a model, and paths to those inside of others.

    Args:
        model: With its layers.
    """
    found = [(layer.name, path) for path, layer in _walk("", model)]
    return list(dict.fromkeys(name for pair in found for name in pair))


def parts_of(layer: keras.Layer) -> list[keras.Layer]:
    """A layer and all layers inside it.

    Args:
        layer: Any layer.
    """
    found = {id(layer): layer}
    pending = [layer]
    while pending:
        for child in sublayers(pending.pop()):
            if id(child) not in found:
                found[id(child)] = child
                pending.append(child)
    return list(found.values())


def _apart(found: Any) -> dict[str, keras.Layer]:
    """Of layers by path those that are in no other, each once."""
    units = {id(layer): (path, layer) for path, layer in reversed([*found])}
    held = {id(part) for _, layer in units.values() for part in parts_of(layer)[1:]}
    return {p: unit for key, (p, unit) in reversed(units.items()) if key not in held}


def _walk(prefix: str, layer: keras.Layer) -> Iterator[tuple[str, keras.Layer]]:
    seen = {id(layer)}
    pending = [(prefix, layer)]
    while pending:
        prefix, layer = pending.pop(0)
        for child in sublayers(layer):
            if id(child) not in seen:
                seen.add(id(child))
                yield f"{prefix}{child.name}", child
                pending.append((f"{prefix}{child.name}/", child))


class _Search:
    def __init__(self, model: keras.Model) -> None:
        self.total = max(_size(model), 1)

    def inside(
        self, prefix: str, layer: keras.Layer, above: frozenset[int] = frozenset()
    ) -> Iterator[tuple[str, keras.Layer]]:
        above |= {id(layer)}
        elements = _elements(layer)
        for child in sublayers(layer):
            if id(child) in above or not sublayers(child):
                continue
            if self._divided(child, id(child) in elements):
                yield from self.inside(f"{prefix}{child.name}/", child, above)
            else:
                yield f"{prefix}{child.name}", child

    def _divided(self, layer: keras.Layer, element: bool) -> bool:
        if _is_built_in(layer) or not any(map(sublayers, sublayers(layer))):
            return False
        share = _size(layer) / self.total
        if any(_elements(part) for part in parts_of(layer)):
            return not element or share > _ELEMENT
        return not element and share > _ALONE


def _elements(layer: keras.Layer) -> set[int]:
    """Layers with layers of their own that stand in a row in this one, by `id`."""
    if _is_built_in(layer):
        return set()
    composite = [child for child in sublayers(layer) if sublayers(child)]
    if isinstance(layer, keras.Sequential) or is_functional(layer):
        groups = [[id(child) for child in composite]]
    else:
        kinds = Counter(type(child) for child in composite)
        alike = [id(child) for child in composite if kinds[type(child)] > 1]
        known = {id(child) for child in composite}
        groups = [alike, *([*_in_list(value, known)] for value in layer_lists(layer).values())]
    return {key for group in groups if len(group) > 1 for key in group}


def _in_list(value: Any, known: set[int]) -> Iterator[int]:
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, (list, tuple, Mapping)):
            yield from _in_list(item, known)
        elif id(item) in known:
            yield id(item)


def _is_built_in(layer: keras.Layer) -> bool:
    """Whether it is one of Keras' own layers, such as attention, which are run again as one."""
    return type(layer).__module__.startswith("keras.") and not isinstance(layer, keras.Model)


def _size(layer: keras.Layer) -> int:
    return sum(not sublayers(part) for part in parts_of(layer))
