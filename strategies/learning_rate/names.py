"""The tree of layers from parameter names alone."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Sequence

from strategies.learning_rate.structure import Layer, Parameter, Role, looks_like_norm

_Entry = tuple[tuple[str, ...], str]


def layers_from_names(names: Iterable[str]) -> Layer:
    """Build the tree from dotted (or slashed) parameter names alone.

    A level whose parts are all numbers is taken for a list; embeddings are told by their names,
    norms by their names or, in a list, by standing right after a layer that has no bias, as a
    convolution before a batch norm; two layers are alike when most of the names below them are.
    Where the real modules are at hand, build `Layer`s from them instead: names cannot tell a norm
    that is called `1` after a layer with a bias.

    Args:
        names: Parameter names from the input to the output, for example
            `[name for name, _ in module.named_parameters()]`.

    Raises:
        TypeError: `names` is a single string or no iterable at all.
        ValueError: A name is empty or comes twice.

    Example:
        >>> root = layers_from_names(["blocks.0.w", "blocks.1.w", "norm.weight"])
        >>> [(layer.name, layer.role) for layer in root.children]
        [('blocks', 'list'), ('norm', 'norm')]
    """
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(
            f"names={reprlib.repr(names)} must be a list of parameter names, such as "
            "[name for name, _ in module.named_parameters()]"
        )
    entries: list[_Entry] = []
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"parameter names must be non-empty strings, got {reprlib.repr(name)}; pass "
                "[name for name, _ in module.named_parameters()]"
            )
        if name in seen:
            raise ValueError(f"parameter name {name!r} comes twice; names must be unique")
        seen.add(name)
        entries.append((tuple(re.split(r"[./]", name)), name))
    return _grow(entries, depth=0, kind="network")


def _grow(entries: Sequence[_Entry], depth: int, kind: str, after_biasless: bool = False) -> Layer:
    parts, full = entries[0] if entries else ((), "")
    own = tuple(
        Parameter(name, is_bias=parts[-1].endswith("bias"))
        for parts, name in entries
        if len(parts) == depth + 1
    )
    groups: dict[str, list[_Entry]] = {}
    for entry in entries:
        if len(entry[0]) > depth + 1:
            groups.setdefault(entry[0][depth], []).append(entry)
    is_list = bool(groups) and not own and all(part.isdecimal() for part in groups)
    wraps = len(groups) == 1 and next(iter(groups)).startswith("_")
    kinds = dict.fromkeys(groups, kind) if wraps else _kinds(groups, depth + 1)
    children = tuple(
        _grow(group, depth + 1, kinds[part], is_list and _follows_biasless(part, groups, depth + 1))
        for part, group in groups.items()
    )
    role: Role = "layer"
    if is_list:
        role = "list"
    elif not children and depth and (looks_like_norm(parts[depth - 1]) or after_biasless):
        role = "norm"
    # The first `depth` parts, with the separators that they were written with.
    path = full[: sum(len(part) + 1 for part in parts[:depth]) - 1] if depth else ""
    return Layer(path, kind, role, own, children)


def _follows_biasless(part: str, groups: dict[str, list[_Entry]], depth: int) -> bool:
    """Whether element `part` of a list has a bias and the one before has none.

    A layer goes without a bias where the norm right after it has one. A learned activation, also
    without a bias, stands right after a layer that has one.
    """
    with_bias = {"weight", "bias"}
    second, first = (_below(groups.get(str(int(part) - i), []), depth) for i in (1, 2))
    return _below(groups[part], depth) == with_bias and second == {"weight"} and first != with_bias


def _below(entries: Sequence[_Entry], depth: int) -> set[str]:
    """Names below a layer, without those of wrappers such as `_orig_mod`."""
    return {".".join(p for p in parts[depth:] if p[:1] != "_") for parts, _ in entries}


def _kinds(groups: dict[str, list[_Entry]], depth: int) -> dict[str, str]:
    """A kind for each sub-layer: that of the first one before it with mostly the same names."""
    kinds: dict[str, str] = {}
    known: list[tuple[str, set[str]]] = []
    for part, group in groups.items():
        names = _below(group, depth)
        for kind, others in known:
            if not names.isdisjoint(others) and 2 * len(names & others) >= len(names | others):
                kinds[part] = kind
                break
        else:
            kinds[part] = part
            known.append((part, names))
    return kinds
