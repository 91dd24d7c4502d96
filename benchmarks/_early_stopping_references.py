"""What the network has to beat: gradient boosting and logistic regression on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strategies.early_stopping.features import Curve, budget_features, features
from strategies.early_stopping.forecast import MINIMUM
from strategies.early_stopping.train.batches import Batches
from strategies.early_stopping.train.curves import LearningCurve
from strategies.early_stopping.train.evaluate import NOTICEABLE, first_stops
from strategies.early_stopping.train.rows import Rows, names

# Causal features as a careful practitioner would choose them.
PLAIN = (
    "log_done", "progress", "log_left", "budget_known", "log_since_best", "since_best_of_done",
    "gap", "records", "newest_record", "half_gain", "log_halving_ratio", "log_gain_3", "log_gain_5",
    "log_gain_13", "log_gain_20", "log_gain_0.2", "log_gain_0.5", "slope_5", "slope_20",
    "noise_5", "noise_20",
)  # fmt: skip
THRESHOLDS = np.geomspace(2e-4, 0.2, 32)  # expected improvement
CHANCES = np.geomspace(5e-3, 0.9, 32)  # of a noticeable improvement


@dataclass(frozen=True)
class Reference:
    """What a reference made of a curve, at all moments but the last.

    Args:
        at: Evaluations done.
        expected: Improvement expected, as a share of the range seen so far; None if it has none.
        chance: Chance of a noticeable one.
    """

    at: np.ndarray
    expected: np.ndarray | None
    chance: np.ndarray

    def stops(self, n: int) -> np.ndarray:
        """Evaluations made at each threshold."""
        if self.expected is None:
            return first_stops(self.chance < CHANCES[:, None], self.at, n)
        return first_stops(self.expected < THRESHOLDS[:, None], self.at, n)


class References:
    """The references, trained on the draws that the network gets: truncated copies included.

    Args:
        rows: Training curves, prepared.
        weights: How often each is drawn.
        batches: Batches of 96 curves, of up to 16 moments each.
    """

    def __init__(self, rows: Sequence[Rows], weights: np.ndarray, batches: int = 200) -> None:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        stream = Batches(rows, weights, names(), np.random.default_rng(0), moments=16)
        drawn = [next(stream) for _ in range(batches)]
        x = np.concatenate([batch.x[batch.used] for batch in drawn])
        gain = np.concatenate([batch.gain[batch.used] for batch in drawn])
        self._columns = [*names(), *budget_features(_ONES, np.ones(1, int), np.ones(1))]
        plain = [self._columns.index(name) for name in PLAIN]
        boosting = {
            "learning_rate": 0.05,
            "max_iter": 300,
            "min_samples_leaf": 40,
            "l2_regularization": 1.0,
            "random_state": 0,
        }
        self._models = {}
        for name, used in (
            ("boosting", plain),
            ("boosting, our features", list(range(x.shape[1]))),
        ):
            expect = HistGradientBoostingRegressor(**boosting).fit(x[:, used], np.minimum(gain, 3))
            chance = HistGradientBoostingClassifier(**boosting).fit(x[:, used], gain > NOTICEABLE)
            self._models[name] = (used, expect, chance)
        logistic = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300, C=0.1))
        self._low_high = np.quantile(x, [0.001, 0.999], axis=0)
        clipped = np.clip(x, *self._low_high)
        used = list(range(x.shape[1]))
        self._models["logistic regression"] = (used, None, logistic.fit(clipped, gain > NOTICEABLE))

    def __call__(self, curve: LearningCurve) -> dict[str, Reference]:
        """What each makes of a curve, without its training loss."""
        n = len(curve)
        at = np.arange(min(MINIMUM, n), n)
        columns = features(Curve(curve.values), at)
        columns |= budget_features(columns, at, np.full(len(at), float(n)))
        x = np.column_stack([columns[name] for name in self._columns])
        found = {}
        for name, (used, expect, chance) in self._models.items():
            own = np.clip(x, *self._low_high) if expect is None else x[:, used]
            expected = None if expect is None else expect.predict(own)
            found[name] = Reference(at, expected, chance.predict_proba(own)[:, 1])
        return found


_ONES = {name: np.ones(1) for name in ("since_best_of_done", "half_gain", "train_half_gain")}
