"""Learning curves to train on and to measure against, and where they come from."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from strategies.early_stopping.history import Array, filled, oriented

_FREE = ("MIT", "Apache-2.0", "BSD")
_SHORTEST = 8  # evaluations below which a curve teaches nothing
_LONGEST = 1000  # longer ones are thinned out


@dataclass(frozen=True)
class LearningCurve:
    """One metric of one training run, at each of its evaluations.

    Args:
        values: Higher is better, NaN where missing.
        train: Training loss at the same evaluations, higher is better, or None.
        kind: What sort of source it comes from.
        group: Repository, workload or task: curves of one group are alike, so they are never split
            between training and testing.
        weight: How much the curve counts in training, next to one of weight 1. Default: 1.
        free: Whether its licence allows shipped weights to be trained on it. Default: True.
        metric: What it measures. Default: unknown.
    """

    values: Array
    train: Array | None
    kind: str
    group: str
    weight: float = 1.0
    free: bool = True
    metric: str = ""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def filled(self) -> Array:
        """The values, each hole filled with the last value before it."""
        return filled(self.values)

    @property
    def best(self) -> Array:
        """The best value until each evaluation."""
        return np.maximum.accumulate(self.filled)

    @property
    def family(self) -> str:
        """The group, or what several groups have in common that differ in a detail only."""
        if self.kind in ("algoperf", "taskset"):
            return _family(NUMBERED.get(self.group, self.group))
        return self.group


def usable(curves: Iterable[LearningCurve]) -> list[LearningCurve]:
    """Those of some length that are not flat; the longest thinned out."""
    kept = []
    for curve in curves:
        known = curve.values[np.isfinite(curve.values)]
        if len(known) >= _SHORTEST and np.ptp(known) > 0:
            kept.append(_thinned(curve))
    return kept


def read_table(path: Path) -> list[LearningCurve]:
    """Read a table with a row per evaluation, with these columns.

    `curve, kind, group, licence, metric, mode, epoch, value, train_loss`.
    """
    with gzip.open(path, "rt", newline="") as file:
        rows = groupby(csv.DictReader(file), key=lambda row: row["curve"])
        return [_from_rows(list(lines)) for _, lines in rows]


def _from_rows(rows: list[dict[str, str]]) -> LearningCurve:
    first = rows[0]
    group, kind = first["group"], first["kind"]
    train = oriented([float(row["train_loss"] or "nan") for row in rows], "min")
    return LearningCurve(
        values=oriented([float(row["value"] or "nan") for row in rows], first["mode"]),
        train=train if np.isfinite(train).any() else None,
        kind=kind,
        group=group,
        # Their runs end at a target, so that nearly all are best at their end.
        weight=0.15 if kind == "mlperf" or "modded-nanogpt" in group else 1.0,
        free=first["licence"].startswith(_FREE),
        metric=first["metric"],
    )


def read_bulk(path: Path) -> Iterator[LearningCurve]:
    """Read the archive of TaskSet and AlgoPerf runs."""
    with np.load(path, allow_pickle=False) as file:
        parts = {name: file[name] for name in file.files}
    ends = parts["offset"]
    for i, (begin, end) in enumerate(pairwise(ends)):
        group = str(parts["task"][i])
        if group == "algoperf/?":  # may be any of the workloads that we test on
            continue
        train = oriented(parts["train_loss"][begin:end], "min")
        yield LearningCurve(
            values=oriented(parts["value"][begin:end], str(parts["mode"][i])),
            train=train if np.isfinite(train).any() else None,
            kind="algoperf" if group.startswith("algoperf") else "taskset",
            group=group,
            weight=0.6,
            metric=str(parts["metric"][i]),
        )


def _thinned(curve: LearningCurve) -> LearningCurve:
    if len(curve) <= _LONGEST:
        return curve
    at = np.linspace(0, len(curve) - 1, _LONGEST).round().astype(int)
    train = None if curve.train is None else curve.train[at]
    return replace(curve, values=curve.values[at], train=train)


def _family(group: str) -> str:
    if not group.startswith("algoperf/"):
        return group
    return next((f"algoperf/{name}" for name in _WORKLOADS if group[9:].startswith(name)), group)


_WORKLOADS = (
    "librispeech_conformer", "librispeech_deepspeech", "criteo1tb", "fastmri", "imagenet_resnet",
    "imagenet_vit", "ogbg", "wmt", "mnist",
)  # fmt: skip

_IMDB = "FixedTextRNNClassification_imdb_"
# The development set numbers its workloads. They were matched to those of the archive by value.
NUMBERED = {
    "90": "algoperf/librispeech_conformer",
    "99": "algoperf/librispeech_conformer",
    "100": "algoperf/librispeech_conformer",
    "91": "algoperf/criteo1tb",
    "92": "algoperf/criteo1tb",
    "93": "algoperf/fastmri",
    "94": "algoperf/fastmri",
    "95": "algoperf/fastmri",
    "96": "algoperf/imagenet_resnet",
    "97": "algoperf/imagenet_resnet",
    "101": "algoperf/librispeech_deepspeech",
    "102": "algoperf/ogbg",
    "103": "algoperf/ogbg",
    "105": "algoperf/wmt",
    "106": "algoperf/wmt",
    "111": _IMDB + "patch128_LSTM128_avg_bs64",
    "112": _IMDB + "patch128_LSTM128_bs64",
    "113": _IMDB + "patch128_LSTM128_embed128_bs64",
    "115": _IMDB + "patch32_GRU64_avg_bs128",
    "117": _IMDB + "patch32_IRNN64_relu_last_bs128",
    "118": _IMDB + "patch32_LSTM128_E128_bs128",
    "119": _IMDB + "patch32_LSTM128_bs128",
    "121": _IMDB + "patch32_VRNN64_relu_avg_bs128",
    "122": _IMDB + "patch32_VRNN64_tanh_avg_bs128",
}
