"""The picture shows the curve in its own units, the forecast at the stop, and the stop."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest

from strategies.early_stopping import forecast, plot, stopping_epoch
from tests.strategies.early_stopping.curves import falling, overfitting

mpl.use("agg")


@pytest.fixture(autouse=True)
def _closed() -> None:
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.parametrize("mode", ["min", "max"])
def test_fan_and_stop(mode: str) -> None:
    values = overfitting(80, turn=20) * (100 if mode == "min" else -100)
    stop = stopping_epoch(values, mode, 80)
    assert stop is not None
    ax = plot(values, mode, 80)
    curve, middle, line = ax.get_lines()
    np.testing.assert_array_equal(curve.get_ydata(), values)
    assert line.get_xdata()[0] == stop
    seen = forecast(values[:stop], mode, 80)
    best = values[:stop].min() if mode == "min" else values[:stop].max()
    sign = -1 if mode == "min" else 1
    gain = sign * seen.quantiles[0.5] * np.ptp(values[:stop])
    np.testing.assert_allclose(middle.get_ydata(), [best, best + gain])
    assert list(middle.get_xdata()) == [stop, 80]
    outer = ax.collections[0].get_paths()[0].vertices[:, 1]
    reach = sign * seen.quantiles[0.95] * np.ptp(values[:stop])
    assert np.isclose(outer, best + reach).any()


def test_other_moments_and_curves() -> None:
    import matplotlib.pyplot as plt

    _, ax = plt.subplots()
    assert plot(falling(30), "min", at=10, ax=ax) is ax
    assert list(ax.get_lines()[1].get_xdata()) == [10, 20]  # as many again, for want of a budget
    assert len(plot([1.0, 0.5], "min").get_lines()) == 1  # too short for a forecast
    plot([np.nan] * 5, "min", 9)


def test_a_moment_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="at must be between 1 and 30, the number of values"):
        plot(falling(30), "min", at=31)
