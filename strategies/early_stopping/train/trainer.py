"""Networks made of curves: collected ones, and those of our own simulated runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from strategies.early_stopping.history import Array, oriented
from strategies.early_stopping.network import Network
from strategies.early_stopping.train import simulated, simulated_tasks
from strategies.early_stopping.train.curves import LearningCurve, usable
from strategies.early_stopping.train.evaluate import weights_of
from strategies.early_stopping.train.fit import Recipe, fit
from strategies.early_stopping.train.rows import Rows, rows_of
from strategies.early_stopping.train.simulated import Run, simulate
from strategies.early_stopping.train.store import load_curves, save_curves

SIMULATED = 20_000
_ROUNDED, _DIED = 0.1, 0.03  # shares of the training curves
_ALIVE = 4  # evaluations at least
_SIMULATED_SHARE = 0.6  # of all draws, next to 1 for the collected curves


class Trainer:
    """Makes networks of curves, and prepares each curve only once.

    Args:
        recipe: How to train.
        simulated: Curves of our own runs, which are in every training set.
        seed: Which moments of long curves are looked at.
        report: Called now and then with the step and the loss.
    """

    def __init__(
        self,
        recipe: Recipe,
        simulated: Sequence[LearningCurve] = (),
        seed: int = 0,
        report: Callable[[int, float], None] | None = None,
    ) -> None:
        self._recipe, self._simulated, self._report = recipe, simulated, report
        self._random = np.random.default_rng(seed)
        self._rows: dict[int, Rows] = {}
        for curve in simulated:
            self._prepared(curve)

    def _prepared(self, curve: LearningCurve) -> Rows:
        if id(curve) not in self._rows:
            self._rows[id(curve)] = rows_of(altered(curve, self._random), self._random)
        return self._rows[id(curve)]

    def rows_and_weights(self, curves: Sequence[LearningCurve]) -> tuple[list[Rows], Array]:
        """These curves and the simulated ones, prepared, and how often to draw each."""
        weights = weights_of(curves)
        if self._simulated:
            count = len(self._simulated)
            each = _SIMULATED_SHARE * weights.sum() / count
            weights = np.append(weights, np.full(count, each))
        return [self._prepared(curve) for curve in [*curves, *self._simulated]], weights

    def __call__(self, curves: Sequence[LearningCurve]) -> Network:
        """Train on these curves and the simulated ones."""
        rows, weights = self.rows_and_weights(curves)
        return fit(rows, weights, self._recipe, self._report)


def altered(curve: LearningCurve, random: np.random.Generator) -> LearningCurve:
    """A few curves as logs have them that hold few digits, or as a run that has died leaves them.

    Collected curves have few stretches that are exactly flat; those of users have.

    Args:
        curve: Any curve.
        random: Which curves, and how.
    """
    chance, n = random.random(), len(curve)
    values = curve.values
    if chance < _ROUNDED:
        levels = np.exp(random.uniform(np.log(8), np.log(200)))
        unit = np.ptp(values[np.isfinite(values)]) / levels
        values = np.round(values / unit) * unit
    elif chance < _ROUNDED + _DIED and n > _ALIVE:
        end = int(random.integers(_ALIVE, n))
        values = np.where(np.arange(n) < end, values, curve.filled[end - 1])
    else:
        return curve
    known = values[np.isfinite(values)]
    return replace(curve, values=values) if np.ptp(known) > 0 else curve


def simulated_curves(
    count: int, seed: int = 0, workers: int = 1, keep: Path | None = None
) -> list[LearningCurve]:
    """Curves of our own small training runs.

    Args:
        count: Training runs.
        seed: Seed of the collection. Default: 0.
        workers: Processes. Default: 1.
        keep: Folder in which to keep them for the next time. Default: None.
    """
    file = None if keep is None else keep / f"simulated_{count}_{seed}_{_generator()}.npz"
    if file is not None and file.exists():
        return load_curves(file)
    made = (_curve(run) for block in simulate(count, seed, workers) for run in block)
    curves = usable(made)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_curves(file, curves)
    return curves


def _generator() -> str:
    """Changes with the code that simulates, as the curves do."""
    sources = (Path(module.__file__ or "").read_bytes() for module in (simulated, simulated_tasks))
    return hashlib.sha256(b"".join(sources)).hexdigest()[:8]


def _curve(run: Run) -> LearningCurve:
    losses = oriented(run.train_loss, "min")
    return LearningCurve(
        values=oriented(run.value, run.mode),
        train=losses if np.isfinite(losses).any() else None,
        kind="simulated",
        group=f"simulated/{run.task}",
        metric=run.metric,
    )
