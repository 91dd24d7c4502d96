"""Random batches of curves, cut at random budgets, with what stopping at each moment would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.early_stopping.features import budget_features
from strategies.early_stopping.history import Array
from strategies.early_stopping.train.rows import NEEDED, Rows

_SHORTEST = 8  # evaluations that a budget has at least
_Single = NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """Some curves at some moments each; rows beyond a curve's moments are filled up.

    Args:
        x: Features, by curve, moment and feature; NaN where unknown.
        used: Which moments are real, by curve and moment.
        regret: What stopping there loses, as a share of the range of the curve.
        late_regret: The same as a share of the range after the first tenth of the curve.
        spent: Evaluations done then, as a share of those that would be made.
        gain: The improvement still to come, as a share of the range seen so far.
        place: When the best value comes, as a share of what is left; NaN where none does.
        price: What a whole budget is worth to the user, by curve.
    """

    x: _Single
    used: NDArray[np.bool_]
    regret: _Single
    late_regret: _Single
    spent: _Single
    gain: _Single
    place: _Single
    price: _Single


class Batches:
    """An endless stream of batches.

    Args:
        rows: Curves to draw from.
        weights: How often each is drawn.
        columns: Names of the columns of the rows.
        random: Source of all chance.
        curves: Curves in a batch. Default: 96.
        moments: Moments of each, at most. Default: 48.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        weights: Array,
        columns: Sequence[str],
        random: np.random.Generator,
        curves: int = 96,
        moments: int = 48,
    ) -> None:
        self._rows, self._random = rows, random
        self._p = weights / weights.sum()
        self._needed = [list(columns).index(name) for name in NEEDED]
        self._train = np.array([name.startswith(("train_", "parting_")) for name in columns])
        self._curves, self._moments = curves, moments

    def __next__(self) -> Batch:
        random = self._random
        chosen = random.choice(len(self._rows), self._curves, p=self._p)
        price = np.exp(random.uniform(np.log(0.002), np.log(0.4), self._curves))
        return _stacked([self._one(self._rows[i]) for i in chosen], price)

    def _one(self, rows: Rows) -> list[Array]:
        random, n = self._random, len(rows.y)
        budget = n if random.random() < 0.5 else int(random.integers(min(n, _SHORTEST), n + 1))
        usable = np.flatnonzero(rows.at < budget)
        if len(usable) > self._moments:
            usable = np.sort(random.choice(usable, self._moments, replace=False))
        at, table = rows.at[usable], rows.table[usable]
        if random.random() < 0.5:
            table = np.where(self._train, np.float32(0), table)
        y = rows.y[:budget]
        best, low = np.maximum.accumulate(y), np.minimum.accumulate(y)
        now, end = best[at - 1], best[-1]
        gain = end - now
        relative = gain / np.maximum(now - low[at - 1], 1e-9)
        first = int(np.argmax(best >= end))
        regret = gain / max(end - low[-1], 1e-9)
        settled = y[max(int(0.1 * budget), 1) - 1 :].min()
        late = np.minimum(gain / max(end - settled, 1e-9), 1.0)
        place = np.where(gain > 0, (first + 1 - at) / (budget - at), np.nan)
        claimed = _claim(random, budget)
        needed = {
            name: table[:, i].astype(float) for name, i in zip(NEEDED, self._needed, strict=True)
        }
        known = budget_features(needed, at, np.full(len(at), claimed))
        x = np.column_stack([table, *known.values()])
        return [x, regret, late, at / budget, relative, place]


def _claim(random: np.random.Generator, budget: int) -> float:
    """What the user says the budget is: mostly the truth, at times nothing, or far too much."""
    chance = random.random()
    if chance < 0.1:
        return np.nan
    return float(int(budget * random.uniform(1, 4))) if chance < 0.15 else float(budget)


def _stacked(parts: list[list[Array]], price: Array) -> Batch:
    count = max(len(part[0]) for part in parts)
    width = parts[0][0].shape[1]
    x = np.zeros((len(parts), count, width), np.float32)
    used = np.zeros((len(parts), count), bool)
    others = np.zeros((5, len(parts), count))
    for i, (features, *rest) in enumerate(parts):
        k = len(features)
        x[i, :k], used[i, :k] = features, True
        for row, values in zip(others, rest, strict=True):
            row[i, :k] = values
    regret, late, spent, gain, place = (values.astype(np.float32) for values in others)
    return Batch(x, used, regret, late, spent, gain, place, price.astype(np.float32))
