"""From the structure of a network to the depth of each parameter, 0 being nearest the input."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from strategies.learning_rate.groups import Groups, check_groups, depths_by_groups
from strategies.learning_rate.structure import (
    Layer,
    Parameter,
    last_part,
    looks_like_embedding,
    looks_like_head,
)


def parameter_depths(network: Layer, groups: Groups | None = None) -> dict[str, int]:
    """Depth of every parameter, from 0 (stem and embeddings) to the head.

    With `groups=None` the structure decides. Blocks are the elements of lists (`ModuleList`,
    `Sequential`, functional models) that are themselves made of several layers; stages that
    merely hold such lists are looked into. Each block is a level, what precedes the first is
    level 0, what follows the last is the head, and what stands between two blocks is a level of
    its own, but for norms, which share the level before them. A network without blocks has one
    level for each layer that has weights. Parameters outside of any layer count as embeddings if
    they are called so, else as head, as in BEiT. A shared parameter counts at its deepest use.

    Networks follow one another in the order of definition, unless each has a head of its own (a
    student and its teacher, an ensemble): those stand side by side, all heads on one level.

    Whether a parameter is trainable never enters, so freezing one cannot shift another.

    Args:
        network: The root of the tree.
        groups: The user's own levels instead. Either patterns from the input to the output,
            where pattern `i` claims depth `i` and what none claims is one level above the last;
            or a callable from parameter name to depth. A pattern is the full name of a layer or
            parameter, with shell-style wildcards (`"blocks.*.mlp"`, `"*.bias"`); a layer's name
            claims all below it (`"blocks.1"` does not claim `"blocks.10"`). Default: None.

    Returns:
        Depth by parameter name, in the order of the network.

    Raises:
        TypeError: `groups` is neither a list of strings nor a callable, or the callable returns
            something else than a whole number.
        ValueError: The network has no parameters, a pattern matches nothing, two patterns claim
            one parameter, or a depth is negative.

    Example:
        >>> from strategies.learning_rate import layers_from_names
        >>> network = layers_from_names(
        ...     ["embed.weight", "blocks.0.a.w", "blocks.0.b.w", "blocks.1.a.w", "blocks.1.b.w",
        ...      "norm.weight", "head.weight"])
        >>> parameter_depths(network)["blocks.1.b.w"], parameter_depths(network)["norm.weight"]
        (2, 3)
        >>> parameter_depths(network, groups=["embed", "blocks.*"])["head.weight"]
        2
    """
    check_groups(groups)
    parameters = list(network.all_parameters())
    if not parameters:
        raise ValueError("the network has no parameters; build the model before asking for depths")
    if groups is None:
        depths = _depths_by_structure(network)
    else:
        depths = depths_by_groups([p.name for p in parameters], groups)
    deepest: dict[Hashable, int] = {}
    for p in parameters:
        deepest[p.identity] = max(depths[p.name], deepest.get(p.identity, depths[p.name]))
    return {p.name: deepest[p.identity] for p in parameters}


_Part = Literal["stem", "called stem", "layer", "norm", "block", "called head", "head", "loose"]


@dataclass(frozen=True)
class _Unit:
    """Parameters that always share a level.

    Args:
        parameters: What shares the level.
        part: Which part of the network it is. "called stem" and "called head" are known by a name
            only, which a layer in the middle may have too; "loose" is outside of any layer.
        whole: Name of the head or of the part without blocks that it belongs to, if any.
    """

    parameters: tuple[Parameter, ...]
    part: _Part
    whole: str | None = None


@dataclass(frozen=True)
class _Place:
    """Where in the network a layer is: in a stage, under a head, in a part without blocks."""

    in_stage: bool = False
    head: Literal["called head", "head"] | None = None
    whole: str | None = None


def _depths_by_structure(network: Layer) -> dict[str, int]:
    networks = _side_by_side(network)
    if len(networks) < 2:
        return _depths_in_series(list(_units(network.unwrapped)))
    own = {part: _depths_by_structure(part) for part in networks}
    deepest = max(networks, key=lambda part: max(own[part].values()))
    others = [part for part in networks if part is not deepest]
    depths = _depths_by_structure(network.without(others))
    top = max(depths[p.name] for p in deepest.all_parameters())
    for other in others:
        lift = top - max(own[other].values())
        depths |= {name: depth + lift for name, depth in own[other].items()}
    return depths


def _side_by_side(network: Layer) -> list[Layer]:
    """Networks with blocks and a head of their own: no computation goes through two heads."""
    found = {
        child: inside
        for child in network.unwrapped.children
        if child.holds_blocks and ((inside := _side_by_side(child)) or _ends_in_head(child))
    }
    return next(iter(found.values())) if len(found) == 1 else list(found)


def _ends_in_head(network: Layer) -> bool:
    units = list(_units(network))
    last = max((i for i, unit in enumerate(units) if unit.part == "block"), default=-1)
    fc = [child.name for child in network.unwrapped.children if child.short_name == "fc"]
    return any(unit.part == "head" for unit in units) or any(
        unit.part == "called head" and unit.whole in fc for unit in units[last + 1 :]
    )


def _depths_in_series(units: list[_Unit]) -> dict[str, int]:
    loose = [unit for unit in units if unit.part == "loose"]
    units = _in_order([unit for unit in units if unit.part != "loose"])
    blocks = [i for i, unit in enumerate(units) if unit.part == "block"]
    first, last = (blocks[0], blocks[-1]) if blocks else (0, len(units))
    depths: dict[str, int] = {}
    level, whole = -1, None
    for i, unit in enumerate(units):
        same_part = bool(blocks) and unit.whole is not None and unit.whole == whole
        if i < first or unit.part == "stem":
            level = 0
        elif i == last + 1 or (i <= last and unit.part != "norm" and not same_part):
            level += 1
        whole = unit.whole
        # A norm before everything else goes with the first layer.
        depths |= {p.name: max(level, 0) for p in unit.parameters}
    return depths | {p.name: max(level, 0) for unit in loose for p in unit.parameters}


def _in_order(units: list[_Unit]) -> list[_Unit]:
    """Stem first and head last, wherever the module defined them."""
    units = list(_settled(units))
    heads = [unit for unit in units if unit.part == "head"]
    rest = [unit for unit in units if unit.part != "head"]
    if len({unit.whole for unit in heads}) > 1:  # heads of several tasks are on one level
        heads = [_Unit(tuple(p for unit in heads for p in unit.parameters), "head")]
    rest.sort(key=lambda unit: unit.part != "stem")
    return rest + [replace(unit, part="layer") for unit in heads]


def _settled(units: list[_Unit]) -> Iterator[_Unit]:
    """Decide by the place of a unit what its name leaves open.

    What is called an embedding but follows all blocks is the output of a network for metric
    learning. What is called "fc" is the head of a network that follows, or else a layer like any
    other.
    """
    layers = [i for i, unit in enumerate(units) if unit.part in ("layer", "block")]
    blocks = [i for i in layers if units[i].part == "block"]
    start = layers[0] if layers else len(units)
    end = blocks[-1] if blocks else start
    network_follows = bool(blocks) or all(units[i].whole for i in layers)
    for i, unit in enumerate(units):
        if unit.part == "called stem":
            yield replace(unit, part="stem" if i < end else "layer")
        elif unit.part == "called head":
            yield replace(unit, part="head" if i < start and network_follows else "layer")
        else:
            yield unit


def _units(network: Layer) -> Iterator[_Unit]:
    if network.is_composite:
        yield from _units_below(network, _Place())
    else:
        yield _Unit(tuple(network.all_parameters()), "layer")


def _units_below(layer: Layer, place: _Place) -> Iterator[_Unit]:
    for parameter in layer.parameters:
        yield _Unit((parameter,), _part_of_parameter(parameter, place), place.whole)
    blocks = layer.blocks(place.in_stage)
    for child in layer.children:
        head = place.head or _head_called(child, layer)
        starts_whole = head != place.head or (child.is_composite and not child.holds_blocks)
        whole = place.whole or (child.name if starts_whole else None)
        if not child.is_composite or _is_attention_like(child):
            if child.has_parameters:
                part = head or _part_of_layer(child, place)
                yield _Unit(tuple(child.all_parameters()), part, whole)
        elif child in blocks and not head and not child.is_stage:
            yield _Unit(tuple(child.all_parameters()), "block")
        else:
            yield from _units_below(child, _Place(place.in_stage or bool(blocks), head, whole))


def _head_called(layer: Layer, parent: Layer) -> Literal["called head", "head"] | None:
    if not looks_like_head(layer.short_name):
        return None
    # A head may hold blocks; but where it holds all there are, it is the network.
    if layer.holds_blocks and not any(
        other.holds_blocks for other in parent.children if not looks_like_head(other.short_name)
    ):
        return None
    return "called head" if layer.short_name == "fc" else "head"


def _part_of_layer(layer: Layer, place: _Place) -> _Part:
    called_stem = looks_like_embedding(layer.short_name)
    if layer.role == "embedding" or (layer.role == "norm" and called_stem):
        return "stem"
    # A stage may embed patches anew; only the first such embedding is the stem.
    if called_stem and not place.in_stage:
        return "called stem"
    return "layer" if layer.weight_layers else "norm"


def _part_of_parameter(parameter: Parameter, place: _Place) -> _Part:
    if place.head is not None:
        return place.head
    if looks_like_embedding(last_part(parameter.name)):
        return "stem"
    # Own parameters come before all layers in every definition, so their place says nothing.
    return "loose" if place.whole is None and not place.in_stage else "norm"


def _is_attention_like(layer: Layer) -> bool:
    """A layer with weights of its own and one inner projection, as `nn.MultiheadAttention`."""
    return bool(layer.parameters) and layer.weight_layers == 2
