"""Window statistics against a loop over numpy's own functions."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.early_stopping.history import Events, Extremes, Sums, filled, oriented

VALUES = np.random.default_rng(0).normal(size=50)
WINDOWS = [(b, e) for b in range(0, 50, 3) for e in range(b + 1, 51, 4)]
BEGIN, END = (np.array(side) for side in zip(*WINDOWS, strict=True))


@pytest.mark.parametrize("count", [3, len(WINDOWS)])  # few are looked up without a table
def test_extremes(count: int) -> None:
    extremes = Extremes(VALUES)
    low, high = extremes.low(BEGIN[:count], END[:count]), extremes.high(BEGIN[:count], END[:count])
    windows = [VALUES[b:e] for b, e in WINDOWS[:count]]
    np.testing.assert_array_equal(low, [w.min() for w in windows])
    np.testing.assert_array_equal(high, [w.max() for w in windows])


def test_sums() -> None:
    sums = Sums(VALUES)
    windows = [VALUES[b:e] for b, e in WINDOWS]
    np.testing.assert_allclose(sums.mean(BEGIN, END), [w.mean() for w in windows])
    np.testing.assert_allclose(sums.deviation(BEGIN, END), [w.std() for w in windows], atol=1e-7)
    slopes = [np.polyfit(np.arange(len(w)), w, 1)[0] * (len(w) - 1) for w in windows if len(w) > 1]
    several = END - BEGIN > 1
    np.testing.assert_allclose(sums.slope(BEGIN, END)[several], slopes, atol=1e-10)
    steps = [np.abs(np.diff(w)).sum() / max(len(w) - 1, 1) for w in windows]
    np.testing.assert_allclose(sums.step(BEGIN, END)[several], np.array(steps)[several])


def test_events() -> None:
    happens = np.array([True, False, True, True, False, False])
    events, places = Events(happens[:1], happens[1:]), np.flatnonzero(happens)
    at = np.arange(6)
    np.testing.assert_array_equal(events.count(at), np.cumsum(happens))
    np.testing.assert_array_equal(events.count(np.array([-3])), 0)
    for k in (1, 2, 3):
        seen = [places[: happens[: i + 1].sum()] for i in at]
        expected = [s[-k] if len(s) >= k else places[0] for s in seen]
        np.testing.assert_array_equal(events.newest(at, k), expected)


def test_holes_take_the_value_before_and_those_at_the_start_the_first() -> None:
    nan = np.nan
    np.testing.assert_array_equal(filled(np.array([nan, 1, nan, nan, 2, nan])), [1, 1, 1, 1, 2, 2])
    np.testing.assert_array_equal(filled(np.array([nan, nan])), [0, 0])


def test_orientation() -> None:
    values = [1.0, np.inf, -np.inf, np.nan]
    np.testing.assert_array_equal(oriented(values, "max"), [1.0, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(oriented(values, "min"), [-1.0, np.nan, np.nan, np.nan])


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="mode must be 'min' or 'max', got 'auto'"):
        oriented([1.0], "auto")
    with pytest.raises(ValueError, match=r"one-dimensional, got shape \(1, 2\)"):
        oriented([[1.0, 2.0]], "min")
