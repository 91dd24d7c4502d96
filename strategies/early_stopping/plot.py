"""A picture of a learning curve, of what was forecast for it, and of where the rule stops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from strategies.early_stopping.forecast import LEVELS, View, checked, checked_budget
from strategies.early_stopping.network import network_of
from strategies.early_stopping.rule import stopping_epoch


def plot(
    values: ArrayLike,
    mode: str,
    max_epochs: int | None = None,
    preset: str = "balanced",
    *,
    train_values: ArrayLike | None = None,
    at: int | None = None,
    ax: Any = None,
) -> Any:
    """Draw a curve, the fan of best values forecast at one moment, and the stop.

    Use it to see what the forecaster thinks of a run, and to show why it was stopped.

    Args:
        values: The metric at each evaluation, oldest first; NaN where missing.
        mode: `"min"` if lower is better, `"max"` if higher is.
        max_epochs: Evaluations planned in all. Default: None (unknown).
        preset: `"safe"`, `"balanced"` or `"fast"`. Default: `"balanced"`.
        train_values: The training loss at the same evaluations. Default: None.
        at: Evaluations after which to forecast. Default: None, where the rule stops, or at the end.
        ax: Axes of matplotlib to draw on. Default: None, new ones.

    Returns:
        The axes.

    Raises:
        ValueError: As `forecast` raises it, or `at` is not between 1 and the number of values.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> ax = plot([1 / (1 + epoch) for epoch in range(20)], mode="min", max_epochs=40)
        >>> ax.get_xlabel()
        'evaluation'
    """
    y, train = checked(values, mode, train_values)
    budget = checked_budget(max_epochs, len(y))
    stop = stopping_epoch(values, mode, max_epochs, preset, train_values=train_values)
    moment = at if at is not None else stop if stop is not None else len(y)
    if not 1 <= moment <= len(y):
        raise ValueError(f"at must be between 1 and {len(y)}, the number of values, got {at!r}")
    view = View.of(network_of(), y, train, np.array([moment]), np.array([budget]))
    ax = _curve(values, ax)
    _fan(ax, view, moment, budget, 1 if mode == "max" else -1)
    if stop is not None:
        ax.axvline(stop, color="C3", linestyle="--", label=f"stop ({preset})")
    ax.legend()
    return ax


def _curve(values: ArrayLike, ax: Any) -> Any:
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.subplots()[1]
    metric = np.asarray(values, dtype=float)
    ax.plot(np.arange(1, len(metric) + 1), metric, label="metric")
    ax.set(xlabel="evaluation", ylabel="metric")
    return ax


def _fan(ax: Any, view: View, moment: int, budget: float, sign: int) -> None:
    """The best value to come: half of the chance in the dark band, 90% in the light one."""
    seen = view.forecast(0)
    if seen is None:
        return
    curve = view.curve
    end = budget if np.isfinite(budget) else 2.0 * moment
    # The best value may come at once or at the end; the fan opens in between.
    x = np.array([moment, max(end, moment + 1)])
    reached = curve.best[moment - 1]

    def best(level: float) -> Any:
        gains = np.array([0.0, seen.quantiles[level]]) * curve.range[moment - 1]
        return sign * (curve.origin + curve.unit * (reached + gains))

    low, quarter, middle, three_quarters, high = LEVELS
    ax.fill_between(x, best(low), best(high), color="C1", alpha=0.2, linewidth=0)
    ax.fill_between(x, best(quarter), best(three_quarters), color="C1", alpha=0.4, linewidth=0)
    ax.plot(x, best(middle), color="C1", label=f"best value to come, seen from {moment}")
