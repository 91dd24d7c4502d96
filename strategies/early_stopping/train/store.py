"""Curves in one file, so that runs that took long need not be made again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from strategies.early_stopping.train.curves import LearningCurve


def save_curves(path: Path, curves: Sequence[LearningCurve]) -> None:
    """Write curves to an npz file without objects.

    Args:
        path: Where to.
        curves: Which.
    """
    empty = np.array([], dtype=np.float32)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        np.savez_compressed(
            file,
            length=np.array([len(c) for c in curves]),
            values=np.concatenate([empty, *(c.values for c in curves)]).astype(np.float32),
            train=np.concatenate([empty, *(_train(c) for c in curves)]).astype(np.float32),
            kind=np.array([c.kind for c in curves]),
            group=np.array([c.group for c in curves]),
            metric=np.array([c.metric for c in curves]),
        )
    part.replace(path)


def load_curves(path: Path) -> list[LearningCurve]:
    """Read what `save_curves` wrote; all count as free and of weight 1.

    Args:
        path: Where from.
    """
    with np.load(path, allow_pickle=False) as file:
        parts = {name: file[name] for name in file.files}
    ends = np.cumsum(parts["length"])
    split = [np.split(parts[name].astype(np.float64), ends)[:-1] for name in ("values", "train")]
    texts = (parts[name].tolist() for name in ("kind", "group", "metric"))
    return [
        LearningCurve(
            values=values,
            train=train if np.isfinite(train).any() else None,
            kind=kind,
            group=group,
            metric=metric,
        )
        for values, train, kind, group, metric in zip(*split, *texts, strict=True)
    ]


def _train(curve: LearningCurve) -> np.ndarray:
    return np.full(len(curve), np.nan) if curve.train is None else curve.train
