"""Which parts of a model people mean, as they write it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def check_kinds(name: str, value: Any, base: type, some: bool = False) -> tuple[Any, ...]:
    """Classes of parts and names, in a tuple.

    Args:
        name: Of the argument, for messages.
        value: That was passed: one class or name, or several.
        base: Of all such classes.
        some: Whether there has to be one. Default: False.

    Raises:
        TypeError: Something is neither.
        ValueError: There is none where there has to be one.

    Example:
        >>> check_kinds("exclude", "encoder", int), check_kinds("blocks", [bool, "head"], int)
        (('encoder',), (<class 'bool'>, 'head'))
    """
    several = isinstance(value, Iterable) and not isinstance(value, (str, type, base))
    found = tuple(value) if several else (value,)
    for kind in found:
        if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, base)):
            raise TypeError(
                f"{name}={value!r}: pass a list of classes, each a {base.__name__}, or of names"
            )
    if some and not found:
        raise ValueError(
            f"{name}={value!r}: pass at least one class or name, or leave {name}= out for parts "
            "that are found in the model"
        )
    return found


def did_you_mean(kind: Any, known: Iterable[str]) -> str:
    """A question whether another name was meant, to end a message with; nothing if none is near.

    Args:
        kind: That is not there: a class or a name.
        known: Names that are.

    Example:
        >>> did_you_mean("encodr.0", ["encoder", "encoder.0"]), did_you_mean("head", ["encoder"])
        ("; did you mean 'encoder.0'?", '')
    """
    if not isinstance(kind, str):
        return ""
    names = list(known)
    # What is left out in front says more than letters that differ.
    ends = [name for name in names if kind and name.endswith((f".{kind}", f"/{kind}"))]
    found = sorted(ends, key=len) or get_close_matches(kind, names, 1)
    return f"; did you mean {found[0]!r}?" if found else ""
