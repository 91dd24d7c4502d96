"""Depths that the user gives by hand: name patterns, or a callable from name to depth."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

# Deeper than any network; what is beyond is a mistake, such as an id.
_DEEPEST = 1_000_000

Groups = Sequence[str] | Callable[[str], int]


def check_groups(groups: object) -> None:
    """Raise what `depths_by_groups` would raise for `groups` on every network.

    Args:
        groups: What the user passed; None is fine.

    Raises:
        TypeError: It is neither a list of strings nor a callable.
        ValueError: It is empty, or a pattern is.
    """
    if groups is None or callable(groups):
        return
    if isinstance(groups, (str, bytes)) or not isinstance(groups, Sequence):
        raise TypeError(
            f"groups={groups!r} must be a list of name patterns from the input to the output, "
            "or a callable from parameter name to depth"
        )
    if not groups:
        raise ValueError("groups=[] names no level; pass at least one pattern, or None")
    for i, pattern in enumerate(groups):
        if not isinstance(pattern, str):
            raise TypeError(
                f"groups[{i}]={pattern!r} must be a string: the name of a layer or a wildcard"
            )
        if not pattern:
            raise ValueError(
                f"groups[{i}]='' names no layer; pass the name of a layer or a wildcard"
            )


def depths_by_groups(names: Sequence[str], groups: Groups) -> dict[str, int]:
    """Depth of every name, as `groups` says.

    Args:
        names: Parameter names from the input to the output.
        groups: Patterns or a callable; see `parameter_depths`.

    Raises:
        TypeError: The callable returns something else than a whole number.
        ValueError: A pattern matches nothing, two patterns claim one parameter, or a depth is
            negative or absurdly large.

    Example:
        >>> depths_by_groups(["embed.w", "blocks.0.w", "blocks.1.w"], ["embed", "blocks.0"])
        {'embed.w': 0, 'blocks.0.w': 1, 'blocks.1.w': 2}
    """
    if callable(groups):
        return {name: _checked(_asked(groups, name), name) for name in names}
    depths: dict[str, int] = {}
    for depth, pattern in enumerate(groups):
        claimed = [name for name in names if _claims(pattern, name)]
        if not claimed:
            dot = "/" if "/" in names[0] else "."
            raise ValueError(
                f"groups[{depth}]={pattern!r} matches no parameter; use a layer's full name, or "
                f"a wildcard such as '*{dot}{pattern.strip('*./')}', over names such as "
                f"{names[0]!r} or "
                f"{names[-1]!r}"
            )
        for name in claimed:
            if name in depths:
                raise ValueError(
                    f"groups[{depths[name]}]={groups[depths[name]]!r} and "
                    f"groups[{depth}]={pattern!r} both claim {name!r}; make the patterns disjoint"
                )
            depths[name] = depth
    return {name: depths.get(name, len(groups)) for name in names}


def _asked(groups: Callable[[str], int], name: str) -> object:
    try:
        return groups(name)
    except Exception as error:
        error.add_note(f"raised by groups({name!r}), which is to return a depth >= 0 for each name")
        raise


def _checked(depth: object, name: str) -> int:
    try:  # arrays and tensors have `__index__` too, and use it for some values only
        number = None if isinstance(depth, bool) else operator.index(depth)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(
            f"groups({name!r}) returned {depth!r}; return the depth as a whole number >= 0"
        )
    if not 0 <= number <= _DEEPEST:
        raise ValueError(
            f"groups({name!r}) returned {reprlib.repr(number)}; return a depth >= 0 (0 = input), "
            f"at most {_DEEPEST}"
        )
    return number


def _claims(pattern: str, name: str) -> bool:
    """Whether a pattern is the name, or that of a layer above it."""
    named = name == pattern or name.startswith((f"{pattern}.", f"{pattern}/"))
    return named or any(fnmatchcase(name, f"{pattern}{tail}") for tail in ("", ".*", "/*"))
