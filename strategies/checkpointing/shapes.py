"""Shapes of batches, by which plans are kept."""

from __future__ import annotations

import math

Shapes = tuple[tuple[int, ...], ...]


def elements(shapes: Shapes) -> int:
    """Of arrays of these shapes together.

    Args:
        shapes: Of the arrays of a batch.

    Example:
        >>> elements(((2, 3), (2,)))
        8
    """
    return sum(map(math.prod, shapes))


def in_words(shapes: Shapes) -> str:
    """Shapes as text.

    Args:
        shapes: Of the arrays of a batch.

    Example:
        >>> in_words(((8, 128), (8,)))
        '8x128, 8'
    """
    return ", ".join("x".join(map(str, shape)) for shape in shapes) or "unknown"


def somewhat_larger(known: Shapes, asked: Shapes) -> bool:
    """Whether every dimension is as large, and the whole at most twice as large.

    Args:
        known: Shapes of one batch.
        asked: Of another.

    Example:
        >>> somewhat_larger(((8, 4),), ((5, 4),)), somewhat_larger(((8, 4),), ((2, 4),))
        (True, False)
    """
    if len(known) != len(asked) or any(len(a) != len(b) for a, b in zip(known, asked, strict=True)):
        return False
    pairs = [(a, b) for k, s in zip(known, asked, strict=True) for a, b in zip(k, s, strict=True)]
    return all(a >= b for a, b in pairs) and elements(known) <= 2 * elements(asked)
