"""Forecasts: what must hold for any weights, and that they know falling from flat."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.early_stopping import Forecast, forecast
from strategies.early_stopping.forecast import LEVELS, chance_of_more
from tests.strategies.early_stopping.curves import curves, falling, overfitting


def numbers(f: Forecast) -> np.ndarray:
    return np.array([f.p_improve, f.expected_improvement, *f.quantiles.values(), f.uncertainty])


@given(curves(), st.floats(-1000, 1000), st.floats(1e-3, 1e3), st.booleans())
def test_units_do_not_matter(values: np.ndarray, shift: float, scale: float, turn: bool) -> None:
    known = values[np.isfinite(values)]
    span = np.ptp(known) if len(known) else 1.0
    moved = scale * (values + shift * span)
    other = forecast(-moved, "max", 80) if turn else forecast(moved, "min", 80)
    np.testing.assert_allclose(numbers(other), numbers(forecast(values, "min", 80)), atol=1e-6)


@given(curves(shortest=1), st.none() | st.integers(60, 300))
def test_it_is_a_distribution(values: np.ndarray, budget: int | None) -> None:
    seen = forecast(values, "min", budget)
    if len(values) < 3:
        assert np.isnan(numbers(seen)).all()
        assert not seen.in_distribution
        return
    assert 0 <= seen.p_improve <= 1
    assert seen.expected_improvement >= 0
    assert list(seen.quantiles) == list(LEVELS)
    assert (np.diff(list(seen.quantiles.values())) >= 0).all()
    assert seen.uncertainty >= 0
    assert math.isnan(seen.evaluations_to_best) == (budget is None)


@pytest.mark.parametrize("values", [[], [[1.0]]])
def test_bad_values(values: list[float]) -> None:
    with pytest.raises(ValueError, match="values"):
        forecast(values, "min")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="mode must be 'min' or 'max', got 'auto'"):
        forecast([1.0, 2.0], "auto")
    with pytest.raises(ValueError, match="max_epochs=1 is less than the 2 evaluations in values"):
        forecast([1.0, 2.0], "min", 1)
    with pytest.raises(TypeError, match=r"max_epochs must be a whole number or None, got 2\.5"):
        forecast([1.0, 2.0], "min", 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="train_values has 1 entries and values 2"):
        forecast([1.0, 2.0], "min", train_values=[1.0])


@pytest.mark.parametrize(
    "values", [[1.0], [math.nan] * 9, [math.inf, -math.inf, 1.0], [1.0] * 9, [1e308, -1e308, 0.0]]
)
def test_odd_curves(values: list[float]) -> None:
    seen = forecast(values, "min", 20)
    moved = len({v for v in values if abs(v) < 1e300}) > 1
    assert not seen.in_distribution or moved
    assert np.isfinite(numbers(seen)).all() == (len(values) > 2)


def test_ten_thousand_evaluations() -> None:
    seen = forecast(falling(10_000), "min", 10_001)
    assert seen.p_improve < 0.5 or seen.expected_improvement < 0.01


def test_falling_promises_more_than_flat_and_flat_more_than_overfitting() -> None:
    still = forecast(falling(20, 0.005), "min", 60).expected_improvement
    rising = forecast(overfitting(40, turn=20), "min", 60).expected_improvement
    assert still > 0.02 > rising


def test_less_is_left_when_less_of_the_budget_is() -> None:
    values = falling(30, 0.01)
    gains = [forecast(values, "min", n).expected_improvement for n in (31, 40, 60, 120)]
    assert gains == sorted(gains)
    assert gains[-1] > 2 * gains[0]


def test_chance_of_more_against_the_bins() -> None:
    edges = np.array([0.01, 0.1, 1.0])
    chances = np.array([[0.4, 0.3, 0.2, 0.1]])
    given_ = {0.0: 0.6, 0.01: 0.6, 0.1: 0.3, 10**-0.5: 0.2, 1.0: 0.1, 10.0: 0.1, 1e9: 0.1}
    for improvement, chance in given_.items():
        found = chance_of_more(chances, edges, np.array([improvement]))
        assert found == pytest.approx(chance), improvement


def test_nothing_is_left_when_the_budget_is_spent() -> None:
    seen = forecast([1 / (1 + epoch) for epoch in range(30)], mode="min", max_epochs=30)
    assert seen.p_improve == seen.expected_improvement == seen.evaluations_to_best == 0
    assert set(seen.quantiles.values()) == {0.0}
