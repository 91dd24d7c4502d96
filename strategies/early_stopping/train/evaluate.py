"""Networks judged on curves that they have never seen, and the prices behind the presets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.early_stopping.forecast import MINIMUM, View
from strategies.early_stopping.history import Array
from strategies.early_stopping.network import Network
from strategies.early_stopping.rule import PredictiveStopping
from strategies.early_stopping.train.curves import LearningCurve
from strategies.early_stopping.train.fit import EDGES
from strategies.early_stopping.train.folds import folds
from strategies.early_stopping.train.replay import Replay

PRICES = np.geomspace(0.001, 0.4, 32)
# Mean regret, as a share of the range of a curve, that each preset is to give up.
NOTICEABLE = float(EDGES[0])
_NEWTON_STEPS, _PRIOR = 40, 10.0
REGRETS = {"safe": 0.002, "balanced": 0.008, "fast": 0.016}


@dataclass(frozen=True)
class Seen:
    """What a network, and the rule around it, made of a curve.

    Args:
        curve: The curve.
        at: Evaluations done at each moment.
        odds: Log-odds of stopping, by price and moment, where the curve looks like those of the
            training set; elsewhere minus infinity.
        anyway: Where the rule stops at any price: the curve is flat, lost, or patience decides.
        probabilities: Of each bin of the improvement to come, by moment.
        fold: Which fold the curve was tested in. Default: 0.
    """

    curve: LearningCurve
    at: NDArray[np.int64]
    odds: Array
    anyway: NDArray[np.bool_]
    probabilities: Array
    fold: int = 0

    @classmethod
    def of(cls, network: Network, curve: LearningCurve, train: bool, fold: int = 0) -> Seen:
        """Let a network look at all moments of a curve but the last."""
        n = len(curve)
        at = np.arange(min(MINIMUM, n), n)
        losses = curve.train if train else None
        view = View.of(network, curve.values, losses, at, np.full(len(at), float(n)))
        odds = network.stopping(view.seen, PRICES).mean(axis=0)
        odds = np.where(view.trusted, odds, -np.inf)
        anyway = PredictiveStopping("max").verdict(view, curve.values, np.zeros(len(at), bool)).stop
        return cls(curve, at, odds, anyway, view.probabilities, fold)

    @property
    def stops(self) -> NDArray[np.int64]:
        """Evaluations made at each price."""
        return first_stops((self.odds > 0) | self.anyway, self.at, len(self.curve))

    def stops_at(self, price: float) -> int:
        """Evaluations made at a price between those of `PRICES`."""
        where = np.interp(np.log(price), np.log(PRICES), np.arange(len(PRICES)))
        low, share = int(where), where % 1
        high = min(low + 1, len(PRICES) - 1)
        with np.errstate(invalid="ignore"):  # no odds where the curve is not trusted
            odds = (1 - share) * self.odds[low] + share * self.odds[high]
        return int(first_stops((odds > 0)[None] | self.anyway, self.at, len(self.curve))[0])

    @property
    def improved(self) -> Array:
        """Improvement still to come at each moment, as a share of the range seen so far."""
        return improvements(self.curve, self.at)


def first_stops(stop: NDArray[np.bool_], at: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Evaluations made by rules that stop at the first moment that says so.

    Args:
        stop: By rule and moment.
        at: Evaluations done at each moment.
        n: Evaluations of the whole curve.
    """
    return np.where(stop.any(axis=1), at[stop.argmax(axis=1)], n)


def improvements(curve: LearningCurve, at: NDArray[np.int64]) -> Array:
    """Improvement still to come at some moments, as a share of the range seen so far."""
    best, worst = curve.best, np.minimum.accumulate(curve.filled)
    return np.asarray((best[-1] - best[at - 1]) / np.maximum(best - worst, 1e-300)[at - 1])


def cross_validated(
    train: Callable[[Sequence[LearningCurve]], Network],
    tested: Sequence[LearningCurve],
    others: Sequence[LearningCurve],
) -> Iterator[Seen]:
    """Each tested curve as seen by a network that was trained on other families.

    Args:
        train: Makes a network of curves.
        tested: Curves to be judged on.
        others: Further curves to train on.

    The networks are not shown the training loss, for many logs have none.
    """
    for i, fold in enumerate(folds(tested, others)):
        if fold.test:
            network = train(fold.train)
            yield from (Seen.of(network, curve, train=False, fold=i) for curve in fold.test)


def preset_prices(seen: Sequence[Seen]) -> dict[str, float]:
    """The price at which each preset gives up as much as it is meant to, on average."""
    stops = np.array([s.stops for s in seen])
    curves = [s.curve for s in seen]
    regret = [Replay.of(curves, column).regret.mean() for column in stops.T]
    rising = np.maximum.accumulate(regret)
    return {
        name: float(np.exp(np.interp(target, rising, np.log(PRICES))))
        for name, target in REGRETS.items()
    }


def calibration(seen: Sequence[Seen]) -> tuple[float, float]:
    """Slope and shift of the log-odds of a noticeable improvement that fit best.

    Args:
        seen: Curves as seen by a network that was not trained on them.
    """
    chance = np.concatenate([1 - s.probabilities[:, 0] for s in seen])
    return platt(chance, np.concatenate([s.improved > NOTICEABLE for s in seen]))


def platt(chance: Array, happened: NDArray[np.bool_]) -> tuple[float, float]:
    """Slope and shift of the log-odds of some chances that fit best what happened.

    By Newton's method, held near no change at all by what a few moments would say against it.

    Source:
        Platt, "Probabilistic outputs for support vector machines" (1999).
    """
    chance = np.clip(chance, 1e-6, 1 - 1e-6)
    x = np.column_stack([np.log(chance / (1 - chance)), np.ones(len(chance))])
    unchanged = np.array([1.0, 0.0])
    w = unchanged
    for _ in range(_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
        gradient = x.T @ (p - happened) + _PRIOR * (w - unchanged)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + _PRIOR * np.eye(2)
        w = w - np.clip(np.linalg.solve(hessian, gradient), -0.5, 0.5)  # may overshoot at first
    return float(w[0]), float(w[1])


def weights_of(curves: Sequence[LearningCurve]) -> Array:
    """How often to draw each curve: groups of many curves count for more, but not as many times."""
    size = Counter(curve.group for curve in curves)
    return np.array([curve.weight * size[curve.group] ** -0.5 for curve in curves])
