"""Estimates with their 95% intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """An estimate and the bounds of its 95% interval."""

    estimate: float
    low: float
    high: float


def median_ratio(
    times: Sequence[Sequence[float]], bare: Sequence[Sequence[float]], resamples: int = 2000
) -> Interval:
    """Median of `times / bare`, step by step, over several processes.

    The bootstrap draws processes first and steps within them second: what differs from one
    process to the next (where the allocator put things) is then part of the interval.

    Args:
        times: For every process, the duration of each step.
        bare: The same of the bare fit; step `i` ran next to step `i` of `times`.
        resamples: Number of bootstrap resamples. Default: 2000.
    """
    ratios = [np.asarray(t) / np.asarray(b) for t, b in zip(times, bare, strict=True)]
    generator = np.random.default_rng(0)
    medians = []
    for _ in range(resamples):
        drawn = generator.integers(len(ratios), size=len(ratios))
        sample = [generator.choice(ratios[i], size=len(ratios[i])) for i in drawn]
        medians.append(np.median(np.concatenate(sample)))
    low, high = np.quantile(medians, [0.025, 0.975])
    return Interval(float(np.median(np.concatenate(ratios))), float(low), float(high))


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean with Student's 95% interval; pass differences for a paired comparison."""
    from scipy.stats import t

    array = np.asarray(values, dtype=float)
    mean = float(array.mean())
    if len(array) < 2:
        return Interval(mean, float("nan"), float("nan"))
    error = array.std(ddof=1) / np.sqrt(len(array))
    half = float(t.ppf(0.975, len(array) - 1) * error)
    return Interval(mean, mean - half, mean + half)
