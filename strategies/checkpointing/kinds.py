"""Which parts of a model people mean, as they write it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def check_kinds(name: str, value: Any, base: type) -> tuple[Any, ...]:
    """Classes of parts and names, in a tuple.

    Args:
        name: Of the argument, for messages.
        value: That was passed: one class or name, or several.
        base: Of all such classes.

    Raises:
        TypeError: Something is neither.

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
    return found
