"""Curves as rows of features, ready for training: moments, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.early_stopping.features import Curve, Index, features
from strategies.early_stopping.forecast import MINIMUM
from strategies.early_stopping.history import Array, filled
from strategies.early_stopping.train.curves import LearningCurve

_MOMENTS = 64  # at most, of one curve

_Single = NDArray[np.float32]


@dataclass(frozen=True)
class Rows:
    """One curve at some of its moments.

    Args:
        at: Evaluations done, ascending.
        table: Features that know no budget, a column for each name.
        y: Values of the whole curve, holes filled, 0 at the worst and 1 at the best.
    """

    at: Index
    table: _Single
    y: Array


def rows_of(curve: LearningCurve, random: np.random.Generator | None = None) -> Rows:
    """Features of a curve at all its moments, or at some drawn at random.

    Args:
        curve: Any curve.
        random: Draws the moments. Default: None, all.
    """
    at = np.arange(MINIMUM, len(curve) + 1)
    if random is not None and len(at) > _MOMENTS:
        at = np.sort(random.choice(at, _MOMENTS, replace=False))
    columns = features(Curve(curve.values, curve.train), at)
    y = filled(curve.values)
    table = np.column_stack(list(columns.values())).astype(np.float32)
    return Rows(at, table, (y - y.min()) / np.ptp(y))


def names() -> list[str]:
    """Names of the columns of `Rows.table`."""
    return list(features(Curve(np.array([0.0, 1.0])), np.array([2])))


# Columns that the features of the budget are made of.
NEEDED = ("since_best_of_done", "half_gain", "train_half_gain")
