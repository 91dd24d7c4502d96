"""Splits by family: what is tested on is unlike anything trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from strategies.early_stopping.train.curves import LearningCurve

FOLDS = 5


@dataclass(frozen=True)
class Fold:
    """One split.

    Args:
        train: Curves to train on: no family of a tested curve is among them.
        test: Curves to test on.
    """

    train: list[LearningCurve]
    test: list[LearningCurve]


def folds(
    tested: Sequence[LearningCurve],
    others: Sequence[LearningCurve],
    count: int = FOLDS,
    seed: int = 0,
) -> Iterator[Fold]:
    """Cross-validation by family.

    Args:
        tested: Each of them is in the test part of one fold; those whose licence allows it are in
            the training part of the rest.
        others: Curves that are only trained on.
        count: Number of folds.
        seed: Which families go together.
    """
    part = _parts(tested, count, seed)
    for i in range(count):
        out = {family for family, p in part.items() if p == i}
        kept = [c for c in tested if c.family not in out and c.free]
        yield Fold(
            train=kept + [c for c in others if c.family not in out],
            test=[c for c in tested if c.family in out],
        )


def _parts(curves: Sequence[LearningCurve], count: int, seed: int) -> dict[str, int]:
    """Part of each family, so that each part has its share of every kind."""
    random = np.random.default_rng(seed)
    kinds: dict[str, str] = {c.family: c.kind for c in curves}
    part: dict[str, int] = {}
    for kind in sorted(set(kinds.values())):
        names = sorted(name for name, of in kinds.items() if of == kind)
        start = int(random.integers(count))
        for i, name in enumerate(random.permutation(names)):
            part[str(name)] = (start + i) % count
    return part
