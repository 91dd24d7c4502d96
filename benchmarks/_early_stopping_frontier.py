"""What a family of stopping rules saves at a given regret, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks._stats import Interval
from strategies.early_stopping.train.curves import LearningCurve
from strategies.early_stopping.train.replay import Replay

RESAMPLES = 1000


@dataclass(frozen=True)
class Frontier:
    """A rule at each of its thresholds, on the same curves.

    Args:
        groups: Index of the group of each curve.
        families: Index of the family of each curve: groups that differ in a detail only.
        saved: Share of evaluations saved, by threshold and curve.
        regret: Regret as a share of the range, likewise.
        late: Regret as a share of the range after the first tenth, likewise.
    """

    groups: np.ndarray
    families: np.ndarray
    saved: np.ndarray
    regret: np.ndarray
    late: np.ndarray

    @classmethod
    def of(cls, curves: Sequence[LearningCurve], stops: np.ndarray) -> Frontier:
        """Replay a rule.

        Args:
            curves: Finished curves.
            stops: Evaluations made, by threshold and curve.
        """
        replays = [Replay.of(curves, row) for row in stops]
        _, groups = np.unique([f"{c.kind} {c.group}" for c in curves], return_inverse=True)
        _, families = np.unique([f"{c.kind} {c.family}" for c in curves], return_inverse=True)
        saved, regret, late = (
            np.array([getattr(r, name) for r in replays])
            for name in ("saved", "regret", "late_regret")
        )
        return cls(groups, families, saved, regret, late)

    def only(self, chosen: np.ndarray) -> Frontier:
        """The same on some of the curves."""
        _, groups = np.unique(self.groups[chosen], return_inverse=True)
        _, families = np.unique(self.families[chosen], return_inverse=True)
        return Frontier(
            groups,
            families,
            self.saved[:, chosen],
            self.regret[:, chosen],
            self.late[:, chosen],
        )

    def saved_at(self, target: float, weights: np.ndarray, what: str = "regret") -> float:
        """Mean share saved where the mean regret is `target`.

        Args:
            target: Mean regret.
            weights: Of each curve.
            what: `"regret"` or `"late"`.
        """
        share = weights / weights.sum()
        saved, regret = self.saved @ share, getattr(self, what) @ share
        order = np.argsort(regret)
        return float(np.interp(target, regret[order], np.maximum.accumulate(saved[order])))

    def late_at(self, saved: float, weights: np.ndarray) -> float:
        """Mean regret after the first tenth where the mean share saved is `saved`."""
        share = weights / weights.sum()
        order = np.argsort(self.saved @ share)
        return float(np.interp(saved, (self.saved @ share)[order], (self.late @ share)[order]))

    @property
    def micro(self) -> np.ndarray:
        """Weights by which each curve counts the same."""
        return np.ones(len(self.groups))

    @property
    def macro(self) -> np.ndarray:
        """Weights by which each group counts the same."""
        return np.asarray(1 / np.bincount(self.groups)[self.groups])


def at_regret(
    rules: dict[str, Frontier], target: float, macro: bool = False
) -> dict[str, Interval]:
    """Share that each rule saves at a mean regret, with a bootstrap over families."""

    def figure(rule: Frontier, weights: np.ndarray) -> float:
        return rule.saved_at(target, weights)

    return _bootstrapped(rules, figure, macro)


def over(
    rules: dict[str, Frontier], ours: str, target: float, macro: bool = False
) -> dict[str, Interval]:
    """How much more `ours` saves than each other rule, on the same resamples of families."""
    others = {name: rule for name, rule in rules.items() if name != ours}

    def figure(rule: Frontier, weights: np.ndarray) -> float:
        return rules[ours].saved_at(target, weights) - rule.saved_at(target, weights)

    return _bootstrapped(others, figure, macro)


def _bootstrapped(rules: dict[str, Frontier], figure, macro: bool) -> dict[str, Interval]:  # type: ignore[no-untyped-def]
    first = next(iter(rules.values()))
    base = first.macro if macro else first.micro
    count = first.families.max() + 1
    random = np.random.default_rng(0)
    draws = random.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    found = {}
    for name, rule in rules.items():
        resampled = [figure(rule, base * drawn[rule.families]) for drawn in draws]
        low, high = np.quantile(resampled, [0.025, 0.975])
        found[name] = Interval(figure(rule, base), float(low), float(high))
    return found


def calibration_error(chance: np.ndarray, happened: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error: mean distance between chance and frequency, bin by bin."""
    index = np.minimum((chance * bins).astype(int), bins - 1)
    error = 0.0
    for i in np.unique(index):
        inside = index == i
        error += abs(chance[inside].mean() - happened[inside].mean()) * inside.mean()
    return float(error)
