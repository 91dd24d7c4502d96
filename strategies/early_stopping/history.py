"""A learning curve as the forecaster sees it: higher is better, holes filled, no unit."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

MODES = ("min", "max")
_HUGE = 1e300  # differences of what is larger are not finite
_FEW = 8  # windows


def oriented(values: ArrayLike, mode: str) -> Array:
    """Values as float64, higher is better, NaN for what is not finite, or nearly so."""
    if mode not in MODES:
        raise ValueError(f"mode must be 'min' or 'max', got {mode!r}")
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"values must be one-dimensional, got shape {array.shape}")
    return np.where(np.abs(array) < _HUGE, array if mode == "max" else -array, np.nan)


def filled(values: Array) -> Array:
    """Each hole takes the last value before it; those at the start, the first one."""
    known = np.isfinite(values)
    if known.all():
        return values
    if not known.any():
        return np.zeros_like(values)
    last = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
    first = int(np.argmax(known))
    return values[np.where(last < 0, first, last)]


class Events:
    """Where in a sequence something happens.

    Args:
        happens: Whether it does, in one piece or several.
    """

    def __init__(self, *happens: ArrayLike) -> None:
        self._places = np.flatnonzero(np.concatenate(happens))

    def count(self, last: NDArray[np.int64]) -> NDArray[np.int64]:
        """How often up to and at each place; never before the first."""
        return np.searchsorted(self._places, last, side="right")

    def newest(self, last: NDArray[np.int64], k: int = 1) -> NDArray[np.int64]:
        """The `k`-th newest place up to each one, or the first ever where there are fewer."""
        return self._places[np.maximum(self.count(last) - k, 0)]


class Extremes:
    """Minimum and maximum over any window of a sequence, many windows at once.

    For many windows a sparse table: level `k` holds the extremes of all windows of length `2 ** k`.
    For a few it would cost more than it saves.
    """

    def __init__(self, values: Array) -> None:
        self._values = values

    @cached_property
    def _level(self) -> NDArray[np.int64]:
        return np.log2(np.maximum(np.arange(len(self._values) + 1), 1)).astype(np.int64)

    @cached_property
    def _lowest(self) -> Array:
        return _table(self._values, np.minimum)

    @cached_property
    def _highest(self) -> Array:
        return _table(self._values, np.maximum)

    def low(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> Array:
        """Minimum over `[begin, end)`, which must not be empty."""
        if len(begin) < _FEW:
            return np.array([self._values[b:e].min() for b, e in zip(begin, end, strict=True)])
        level = self._level[end - begin]
        return np.asarray(
            np.minimum(self._lowest[level, begin], self._lowest[level, end - 2**level])
        )

    def high(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> Array:
        """Maximum over `[begin, end)`, which must not be empty."""
        if len(begin) < _FEW:
            return np.array([self._values[b:e].max() for b, e in zip(begin, end, strict=True)])
        level = self._level[end - begin]
        return np.asarray(
            np.maximum(self._highest[level, begin], self._highest[level, end - 2**level])
        )


def _table(values: Array, extreme: np.ufunc) -> Array:
    table = np.zeros((int(np.log2(len(values))) + 1, len(values)))
    table[0] = values
    for level in range(1, len(table)):
        half, length = 2 ** (level - 1), len(values) - 2**level + 1
        row = table[level - 1]
        table[level, :length] = extreme(row[:length], row[half : half + length])
    return table


class Sums:
    """Means, slopes and deviations over any window of a sequence, many windows at once."""

    def __init__(self, values: Array) -> None:
        self._values = values

    @cached_property
    def _y(self) -> Array:
        return _running(self._values)

    @cached_property
    def _ky(self) -> Array:
        return _running(np.arange(len(self._values)) * self._values)

    @cached_property
    def _yy(self) -> Array:
        return _running(self._values**2)

    @cached_property
    def _steps(self) -> Array:
        return _running(np.abs(np.diff(self._values, prepend=self._values[:1])))

    def mean(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> Array:
        """Mean over `[begin, end)`."""
        return (self._y[end] - self._y[begin]) / (end - begin)

    def step(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> Array:
        """Mean absolute change from one value to the next within `[begin, end)`."""
        begin = np.minimum(begin + 1, end - 1)
        return (self._steps[end] - self._steps[begin]) / (end - begin)

    def slope(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> Array:
        """Least-squares change over the whole of `[begin, end)`."""
        n = (end - begin).astype(np.float64)
        centre = (begin + end - 1) / 2
        covariance = self._ky[end] - self._ky[begin] - centre * (self._y[end] - self._y[begin])
        return covariance * 12 / np.maximum(n * (n**2 - 1), 1.0) * (n - 1)

    def deviation(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> Array:
        """Standard deviation over `[begin, end)`."""
        square = (self._yy[end] - self._yy[begin]) / (end - begin)
        return np.sqrt(np.maximum(square - self.mean(begin, end) ** 2, 0.0))


def _running(values: Array) -> Array:
    """Sums of the first 0, 1, ... values."""
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return sums
