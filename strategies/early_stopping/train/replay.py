"""Replay of stopping rules over finished curves: what they save, and what they lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.early_stopping.history import Array
from strategies.early_stopping.train.curves import LearningCurve


@dataclass(frozen=True)
class Replay:
    """What a rule does to each of some curves.

    Args:
        saved: Share of the evaluations that are not made.
        regret: How much better the best value would have become, as a share of the range.
        late_regret: The same as a share of the range after the first tenth of the curve.
    """

    saved: Array
    regret: Array
    late_regret: Array

    @classmethod
    def of(
        cls, curves: Sequence[LearningCurve], stops: Sequence[int] | NDArray[np.int64]
    ) -> Replay:
        """Replay a rule.

        Args:
            curves: Finished curves.
            stops: Evaluations that the rule makes on each.
        """
        saved, regret, late = [], [], []
        for curve, stop in zip(curves, stops, strict=True):
            n = len(curve)
            best, worst = curve.best, curve.filled.min()
            worst_late = curve.filled[max(int(0.1 * n), 1) - 1 :].min()
            lost = best[-1] - best[stop - 1]
            saved.append(1 - stop / n)
            regret.append(lost / (best[-1] - worst))
            late.append(min(lost / max(best[-1] - worst_late, 1e-12), 1.0))
        return cls(np.array(saved), np.array(regret), np.array(late))


def patience_stops(curves: Sequence[LearningCurve], patience: int) -> NDArray[np.int64]:
    """Evaluations made by the usual rule: stop after so many without a better value."""
    stops = []
    for curve in curves:
        best = curve.best
        index = np.arange(len(best))
        record = np.concatenate([[True], best[1:] > best[:-1]])
        since = index - np.maximum.accumulate(np.where(record, index, 0))
        over = np.flatnonzero(since >= patience)
        stops.append(int(over[0]) + 1 if len(over) else len(best))
    return np.array(stops)
