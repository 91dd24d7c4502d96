"""Curves that the tests share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Curve = NDArray[np.float64]


def falling(n: int, noise: float = 0.0, seed: int = 0) -> Curve:
    """A loss that falls like a power law."""
    random = np.random.default_rng(seed)
    return (1 + np.arange(n)) ** -0.7 + noise * random.normal(size=n)


def overfitting(n: int, turn: int, seed: int = 0) -> Curve:
    """A loss that falls until `turn`, and then rises for good."""
    epochs = np.arange(n)
    noise = 0.002 * np.random.default_rng(seed).normal(size=n)
    return np.exp(-epochs / (turn / 4)) + 0.02 * np.maximum(epochs - turn, 0) + noise


@st.composite
def curves(draw: st.DrawFn, shortest: int = 3, longest: int = 60) -> Curve:
    """Random walks with ties, jumps, plateaus and holes; on a grid, so that ties stay ties."""
    n = draw(st.integers(shortest, longest))
    steps = draw(st.lists(st.integers(-1000, 1000) | st.just(0), min_size=n, max_size=n))
    holes = draw(st.lists(st.sampled_from([False] * 9 + [True]), min_size=n, max_size=n))
    values = np.cumsum(np.array(steps, dtype=float))
    return np.where(holes, np.nan, values)
