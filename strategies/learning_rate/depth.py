"""From the structure of a network to the depth of each parameter, 0 being nearest the input."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from strategies.learning_rate.structure import Layer, Parameter, looks_like_embedding

Groups = Sequence[str] | Callable[[str], int]

_HEAD = re.compile(
    r"^(heads?|fc|classifier|pre_classifier|lm_head|cls|score|qa_outputs|logits|predictions"
    r"|pooler|output_layer|logit_scale|logit_bias|temperature)$"
)


def parameter_depths(network: Layer, groups: Groups | None = None) -> dict[str, int]:
    """Depth of every parameter, from 0 (stem and embeddings) to the head.

    With `groups=None` the structure decides. Blocks are the elements of lists (`ModuleList`,
    `Sequential`, functional models) that are themselves made of several layers; stages that
    merely hold such lists are looked into. Each block is a level, what precedes the first is
    level 0, what follows the last is the head, and what stands between two blocks is a level of
    its own, but for norms, which share the level before them. A network without blocks has one
    level for each layer that has weights. A shared parameter counts at its deepest use.

    Whether a parameter is trainable never enters, so freezing one cannot shift another.

    Args:
        network: The root of the tree.
        groups: The user's own levels instead. Either patterns from the input to the output,
            where pattern `i` claims depth `i` and what none claims is one level above the last;
            or a callable from parameter name to depth. A pattern is a shell-style wildcard over
            the full name (`"blocks.*.mlp.*"`) or the name of a layer (`"blocks.0"` claims all
            below it). Default: None.

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
    elif callable(groups):
        depths = {p.name: _checked_depth(groups(p.name), p.name) for p in parameters}
    else:
        depths = _depths_by_pattern([p.name for p in parameters], groups)
    deepest: dict[Hashable, int] = {}
    for p in parameters:
        deepest[p.identity] = max(depths[p.name], deepest.get(p.identity, 0))
    return {p.name: deepest[p.identity] for p in parameters}


def _checked_depth(depth: object, name: str) -> int:
    if isinstance(depth, bool) or not hasattr(depth, "__index__"):
        raise TypeError(
            f"groups({name!r}) returned {depth!r}; return the depth as a whole number >= 0"
        )
    if (number := int(depth.__index__())) < 0:
        raise ValueError(f"groups({name!r}) returned {number}; return a depth >= 0 (0 = input)")
    return number


def _depths_by_pattern(names: Sequence[str], patterns: Sequence[str]) -> dict[str, int]:
    depths: dict[str, int] = {}
    for depth, pattern in enumerate(patterns):
        claimed = [name for name in names if _claims(pattern, name)]
        if not claimed:
            raise ValueError(
                f"groups[{depth}]={pattern!r} matches no parameter; use a layer's name or a "
                f"wildcard over names such as {names[0]!r} or {names[-1]!r}"
            )
        for name in claimed:
            if name in depths:
                raise ValueError(
                    f"groups[{depths[name]}]={patterns[depths[name]]!r} and "
                    f"groups[{depth}]={pattern!r} both claim {name!r}; make the patterns disjoint"
                )
            depths[name] = depth
    return {name: depths.get(name, len(patterns)) for name in names}


def check_groups(groups: object) -> None:
    """Raise what `parameter_depths` would raise for `groups` on every network."""
    if groups is None or callable(groups):
        return
    if isinstance(groups, str) or not isinstance(groups, Sequence):
        raise TypeError(
            f"groups={groups!r} must be a list of name patterns from the input to the output, "
            "or a callable from parameter name to depth"
        )
    if not groups:
        raise ValueError("groups=[] names no level; pass at least one pattern, or None")
    for i, pattern in enumerate(groups):
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"groups[{i}]={pattern!r} must be a non-empty string")


def _claims(pattern: str, name: str) -> bool:
    below_layer = name.startswith(pattern) and name[len(pattern) : len(pattern) + 1] in ("", ".", "/")
    return below_layer or fnmatchcase(name, pattern)


@dataclass(frozen=True)
class _Unit:
    """Parameters that always share a level."""

    parameters: tuple[Parameter, ...]
    part: Literal["stem", "layer", "norm", "block", "head"]


def _depths_by_structure(network: Layer) -> dict[str, int]:
    units = _in_order(list(_units(network)))
    blocks = [i for i, unit in enumerate(units) if unit.part == "block"]
    first, last = (blocks[0], blocks[-1]) if blocks else (0, len(units))
    depths: dict[str, int] = {}
    level = -1
    for i, unit in enumerate(units):
        if i < first or unit.part == "stem":
            level = 0
        elif i == last + 1 or (i <= last and unit.part != "norm"):
            level += 1
        # A norm before everything else goes with the first layer.
        depths |= {p.name: max(level, 0) for p in unit.parameters}
    return depths


def _in_order(units: list[_Unit]) -> list[_Unit]:
    """Stem first and head last, wherever the module defined them."""
    if all(unit.part == "head" for unit in units):  # "classifier" was the whole network
        return [replace(unit, part="layer") for unit in units]
    rank = {"stem": 0, "head": 2}
    return [
        replace(unit, part="layer") if unit.part == "head" else unit
        for unit in sorted(units, key=lambda unit: rank.get(unit.part, 1))
    ]


def _units(layer: Layer, nested: bool = False, head: bool = False) -> Iterator[_Unit]:
    head = head or (bool(_HEAD.match(layer.short_name)) and not _holds_block_list(layer))
    if layer.role == "norm" or layer.weight_layers <= 1 or _is_attention_like(layer):
        if parameters := tuple(layer.all_parameters()):
            yield _Unit(parameters, _part(layer, head))
        return
    for parameter in layer.parameters:
        yield _Unit((parameter,), _part(parameter, head))
    blocks = _is_block_list(layer, nested)
    for child in layer.children:
        if blocks and child.is_composite and not _is_stage(child):
            yield _Unit(tuple(child.all_parameters()), "block")
        else:
            yield from _units(child, nested=blocks, head=head)


def _part(item: Layer | Parameter, head: bool) -> Literal["stem", "layer", "norm", "head"]:
    short = re.split(r"[./]", item.name)[-1]
    if head or (isinstance(item, Parameter) and _HEAD.match(short)):
        return "head"
    if looks_like_embedding(short) or (isinstance(item, Layer) and item.role == "embedding"):
        return "stem"
    return "norm" if isinstance(item, Layer) and not item.weight_layers else "layer"


def _is_attention_like(layer: Layer) -> bool:
    """A layer with weights of its own and one inner projection, as `nn.MultiheadAttention`."""
    return bool(layer.parameters) and bool(layer.name) and layer.weight_layers == 2


def _is_block_list(layer: Layer, nested: bool) -> bool:
    """Whether the children are blocks that follow one another.

    `nested` says that the layer is itself an element of such a list: a stage may hold one block.
    """
    weighted = [child for child in layer.children if child.weight_layers]
    composite = [child for child in weighted if child.is_composite]
    # A squeeze-excitation among three convolutions does not make the list one of blocks.
    if not composite or 2 * len(composite) < len(weighted):
        return False
    alike = Counter(child.kind for child in composite).most_common(1)[0][1]
    if layer.role == "list":
        single = len(weighted) == 1 and not _holds_block_list(composite[0])
        # Different kinds in one list (self-attention, cross-attention, MLP) make up one block.
        return 2 * alike > len(composite) and (alike >= 2 or nested or single)
    # Blocks held as attributes (block1, block2); two whole networks side by side are not.
    plain = [c for c in composite if c.role != "list" and not _holds_block_list(c)]
    return any(count >= 2 for count in Counter(c.kind for c in plain).values()) and not any(
        _holds_block_list(child) or child.role == "list" for child in composite
    )


def _holds_block_list(layer: Layer) -> bool:
    return _is_block_list(layer, nested=False) or any(
        _holds_block_list(child) for child in layer.children if child.is_composite
    )


def _is_stage(layer: Layer) -> bool:
    """Whether a block list is all that it holds, but for a down-sampling layer or norms."""
    if _is_block_list(layer, nested=True):
        return layer.role == "list"
    inner = [child for child in layer.children if child.is_composite]
    return bool(inner) and all(
        child.role == "list" and _is_block_list(child, nested=True) for child in inner
    )
