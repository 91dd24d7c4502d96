"""How much better a learning curve will still get: a distribution, from the curve so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.early_stopping.features import Curve, Index, budget_features, features
from strategies.early_stopping.history import Array, Events, oriented
from strategies.early_stopping.network import Network, Opinion, network_of

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
MINIMUM = 3  # evaluations before which nothing can be said

_STRANGE = 1.0  # farther from the training set than 99% of it


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a curve will still bring, relative to the range that it has covered so far.

    Args:
        p_improve: Chance that the best value improves by more than 0.1% of the range.
        expected_improvement: Mean improvement of the best value.
        quantiles: Improvement of the best value by level: 0.05, 0.25, 0.5, 0.75, 0.95.
        evaluations_to_best: How many evaluations until the best value, should there be a better
            one; NaN where the budget is unknown.
        uncertainty: Standard deviation of `p_improve` over the networks of the ensemble.
        in_distribution: Whether the curve looks like those of the training set. Where it does
            not, the other numbers mean little, and the rule falls back to patience.
    """

    p_improve: float
    expected_improvement: float
    quantiles: Mapping[float, float]
    evaluations_to_best: float
    uncertainty: float
    in_distribution: bool


def forecast(
    values: ArrayLike,
    mode: str,
    max_epochs: int | None = None,
    train_values: ArrayLike | None = None,
    *,
    weights: str | None = None,
) -> Forecast:
    """Forecast how much better the best value of a metric will get.

    Use it on any history: of a running fit, from a CSV file, of a finished run cut short.

    Args:
        values: The metric at each evaluation so far, oldest first; NaN where missing.
        mode: `"min"` if lower is better, `"max"` if higher is.
        max_epochs: Evaluations planned in all, those in `values` included. Default: None
            (unknown; the forecast is then for about as many again as have been).
        train_values: The training loss at the same evaluations. Default: None.
        weights: File of other weights, as `python -m strategies.early_stopping.train` writes them.
            Default: None, those of the package.

    Returns:
        The forecast, relative to the range seen so far: shifting, scaling or turning the values
        around changes nothing.

    Raises:
        ValueError: `mode` is unknown, `values` is empty or not one-dimensional, `train_values`
            has another length, or `max_epochs` is smaller than the number of values.

    Example:
        >>> losses = [1 / (1 + epoch) for epoch in range(20)]
        >>> early = forecast(losses[:5], mode="min", max_epochs=20)
        >>> late = forecast(losses, mode="min", max_epochs=21)
        >>> early.expected_improvement > late.expected_improvement
        True
    """
    y, train = checked(values, mode, train_values)
    budget = np.array([checked_budget(max_epochs, len(y))])
    view = View.of(network_of(weights), y, train, np.array([len(y)]), budget)
    return view.forecast(0) or _NOTHING_KNOWN


def checked(
    values: ArrayLike, mode: str, train_values: ArrayLike | None
) -> tuple[Array, Array | None]:
    """Values and training loss, higher is better, or an error that says what is wrong."""
    y = oriented(values, mode)
    if not len(y):
        raise ValueError("values is empty; pass the metric of at least one evaluation")
    if train_values is None:
        return y, None
    train = oriented(train_values, "min")
    if len(train) != len(y):
        raise ValueError(
            f"train_values has {len(train)} entries and values {len(y)}; pass one for each "
            "evaluation, NaN where there is none"
        )
    return y, train


def checked_budget(max_epochs: int | None, done: int) -> float:
    """The budget as a number, NaN where it is unknown."""
    if max_epochs is None:
        return float("nan")
    if isinstance(max_epochs, bool) or not isinstance(max_epochs, int | np.integer):
        raise TypeError(f"max_epochs must be a whole number or None, got {max_epochs!r}")
    if max_epochs < done:
        raise ValueError(
            f"max_epochs={max_epochs} is less than the {done} evaluations in values; pass how many "
            "there will be in all, or None"
        )
    return float(max_epochs)


@dataclass(frozen=True)
class View:
    """What a network makes of a curve at some moments.

    Args:
        network: Who looks.
        curve: The curve, prepared.
        at: Evaluations done at each moment.
        budget: Evaluations to look ahead to from each moment, NaN where unknown.
        seen: What the network says.
    """

    network: Network
    curve: Curve
    at: Index
    budget: Array
    seen: Opinion

    @classmethod
    def of(cls, network: Network, y: Array, train: Array | None, at: Index, budget: Array) -> View:
        """Look at a curve (higher is better) at the moments after `at` evaluations."""
        curve = Curve(y, train)
        columns = features(curve, at)
        columns |= budget_features(columns, at, budget)
        return cls(network, curve, at, budget, network(columns))

    @property
    def probabilities(self) -> Array:
        """Of each bin of the improvement to come, by moment."""
        return self.network.calibrated(self.seen.probabilities.mean(axis=0))

    @property
    def trusted(self) -> NDArray[np.bool_]:
        """Where the curve is long enough, has moved, and looks like those of the training set."""
        moved = self.curve.range[self.at - 1] > 0
        return moved & (self.seen.strangeness <= _STRANGE) & (self.at >= MINIMUM)

    def unchanged(self, evaluations: int) -> NDArray[np.bool_]:
        """Where the last so many evaluations all gave the value before them, to the last digit."""
        return self._all_of(self.curve.repeats, evaluations)

    def lost(self, evaluations: int) -> NDArray[np.bool_]:
        """Where the last so many evaluations were all missing."""
        return self._all_of(self.curve.missing, evaluations)

    def _all_of(self, events: Events, evaluations: int) -> NDArray[np.bool_]:
        last = self.at - 1
        count = events.count(last) - events.count(last - evaluations)
        return np.asarray(count == evaluations)

    def odds(self, price: float) -> Array:
        """Log-odds of stopping, by moment, for what a whole budget is worth."""
        return np.asarray(self.network.stopping(self.seen, np.array([price]))[:, 0].mean(axis=0))

    def forecast(self, i: int) -> Forecast | None:
        """The forecast at moment `i`, None where the curve is too short for one."""
        if self.at[i] < MINIMUM:
            return None
        mixed = self.probabilities[i]
        if self.budget[i] <= self.at[i]:
            mixed = np.eye(len(mixed))[0]  # no improvement, for nothing is left to improve in
        left = max(self.budget[i] - self.at[i], 0) if np.isfinite(self.budget[i]) else np.nan
        return Forecast(
            p_improve=float(1 - mixed[0]),
            expected_improvement=float(mixed @ self.network.middles),
            quantiles=_quantiles(mixed, self.network.edges),
            evaluations_to_best=float(left * self.seen.places[:, i].mean()),
            uncertainty=float(self.seen.probabilities[:, i, 0].std()),
            in_distribution=bool(self.trusted[i]),
        )


def chance_of_more(probabilities: Array, edges: Array, improvement: Array) -> Array:
    """Chance that the improvement is larger than a given one, from the chances of the bins.

    For more than the last edge it is the chance of the last bin, hence at least the true one.

    Args:
        probabilities: By moment and bin.
        edges: Between the bins.
        improvement: By moment.
    """
    above = 1 - np.cumsum(probabilities, axis=1)[:, :-1]
    given = np.log(np.maximum(improvement, edges[0]))
    pairs = zip(given, above, strict=True)
    return np.array([np.interp(x, np.log(edges), chances) for x, chances in pairs])


def _grid(edges: Array) -> Array:
    """Logarithms of the upper ends of the bins; the last one is as wide as the one before."""
    return np.asarray(np.log(np.append(edges, edges[-1] ** 2 / edges[-2])))


def _quantiles(probabilities: Array, edges: Array) -> dict[float, float]:
    below = np.cumsum(probabilities)
    values = np.exp(np.interp(LEVELS, below, _grid(edges)))
    return {
        level: 0.0 if level <= below[0] else float(value)
        for level, value in zip(LEVELS, values, strict=True)
    }


_NOTHING_KNOWN = Forecast(
    p_improve=float("nan"),
    expected_improvement=float("nan"),
    quantiles=dict.fromkeys(LEVELS, float("nan")),
    evaluations_to_best=float("nan"),
    uncertainty=float("nan"),
    in_distribution=False,
)
