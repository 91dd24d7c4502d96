"""Features see the past only, have no unit, and are numbers whatever comes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.early_stopping.features import Curve, budget_features, features
from strategies.early_stopping.history import oriented
from tests.strategies.early_stopping.curves import curves, falling


def table(values: np.ndarray, at: np.ndarray, train: np.ndarray | None = None) -> np.ndarray:
    losses = None if train is None else oriented(train, "min")
    columns = features(Curve(oriented(values, "min"), losses), at)
    columns |= budget_features(columns, at, np.full(len(at), 100.0))
    return np.column_stack(list(columns.values()))


@given(curves(), st.data())
def test_the_future_has_no_part_in_them(values: np.ndarray, data: st.DataObject) -> None:
    done, n = data.draw(st.integers(1, len(values))), len(values)
    holes = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    train = np.where(holes, np.nan, falling(n, 0.1))
    at = np.array([done])
    whole = table(values, at, train)
    np.testing.assert_allclose(table(values[:done], at, train[:done]), whole, atol=1e-8)


def test_all_moments_at_once_are_each_moment_by_itself() -> None:
    values, train = falling(40, noise=0.05), falling(40, noise=0.01)
    at = np.arange(1, 41)
    single = [table(values, at[i : i + 1], train) for i in range(40)]
    np.testing.assert_allclose(table(values, at, train), np.concatenate(single), atol=1e-9)


@given(curves(), st.floats(-1000, 1000), st.floats(1e-6, 1e6))
def test_scale_and_shift_change_nothing(values: np.ndarray, shift: float, scale: float) -> None:
    known = values[np.isfinite(values)]
    span = np.ptp(known) if len(known) else 1.0
    at = np.arange(1, len(values) + 1)
    moved = scale * (values + shift * span)
    np.testing.assert_allclose(table(moved, at), table(values, at), atol=1e-5)


@pytest.mark.parametrize(
    "values",
    [[0.0], [np.nan], [np.nan] * 5, [1.0] * 10, [1e300, -1e300, 0.0], [1e-300, 0.0, 1e-300],
     [np.inf, 1.0, -np.inf, 0.5], [0.0, 1e12, 1.0, 0.5]],
)  # fmt: skip
def test_always_finite(values: list[float]) -> None:
    assert np.isfinite(table(np.array(values), np.arange(1, len(values) + 1))).all()


def test_some_by_hand() -> None:
    columns = features(Curve(oriented([5.0, 3.0, 4.0, 1.0, 2.0, 2.0], "min")), np.array([3, 6]))
    assert columns["since_best_of_done"].tolist() == [pytest.approx(1 / 3), pytest.approx(2 / 6)]
    assert columns["gap"].tolist() == [pytest.approx(1 / 2), pytest.approx(1 / 4)]
    assert columns["records"].tolist() == [pytest.approx(2 / 3), pytest.approx(3 / 6)]
    assert columns["repeats"].tolist() == [0.0, pytest.approx(1 / 6)]


def test_a_train_loss_that_is_mostly_missing_counts_as_unknown() -> None:
    values, at = falling(9), np.array([9])
    train = np.where(np.arange(9) < 4, 1.0, np.nan)
    np.testing.assert_array_equal(table(values, at, train), table(values, at))
    assert (table(values, at, falling(9)) != table(values, at)).any()
