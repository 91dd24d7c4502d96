"""Your own training runs as learning curves, from the files that trainers leave behind.

Read are `metrics.csv` of Lightning, Keras' `CSVLogger`, ultralytics' `results.csv` and any other
CSV with a column per metric; JSON of a Keras history and of `transformers`' `trainer_state.json`;
TensorBoard event files.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strategies.early_stopping.history import oriented
from strategies.early_stopping.modes import mode_of
from strategies.early_stopping.train.curves import LearningCurve

_FORECAST = ("_p_improve", "_expected_best")  # what the callbacks log with `log_forecast`
_TRAIN = ("train_loss_epoch", "train_loss", "train/loss", "train/box_loss", "loss", "training_loss")
_HELD_OUT = ("val", "eval", "test", "metrics/")
_PLACE = ("epoch", "step", "_step", "global_step")

# One logged line: names and numbers; and one table: lines in the order in which they were logged.
Line = Mapping[str, float]


def read_folder(folder: Path) -> list[LearningCurve]:
    """Read all training runs below a folder.

    Each folder directly below counts as one group: put runs of one project into one.

    Args:
        folder: Where to look, at any depth.

    Raises:
        ValueError: There is no such folder, or no curve in it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass one that holds training runs")
    found = []
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    tables = {path.parent for path in files if path.suffix == ".csv"}
    for file in files:
        if _has_events(file) and file.parent in tables:
            continue  # the same run, logged twice
        group = file.relative_to(folder).parts[0]
        found += list(curves_in(_lines(file), group))
    if not found:
        raise ValueError(
            f"no validation metrics were found below {folder}; metrics.csv, history.json, "
            "trainer_state.json and TensorBoard event files are read"
        )
    return found


def curves_in(lines: Iterable[Line], group: str) -> Iterator[LearningCurve]:
    """One curve for each validation metric of a run.

    Args:
        lines: What was logged, oldest first; each line need not have all metrics.
        group: Name of the project.
    """
    logged = list(lines)
    names = dict.fromkeys(name for line in logged for name in line)
    for name in names:
        if not name.lower().startswith(_HELD_OUT) or name.endswith(_FORECAST):
            continue
        try:
            mode = mode_of(name)
        except ValueError:  # a rate, a time, or a name of the user's own
            continue
        values, train = [], []
        latest = math.nan
        for at, line in enumerate(logged):
            latest = _train_loss(logged, at, latest)
            if name in line:
                values.append(line[name])
                train.append(latest)
        losses = oriented(train, "min")
        yield LearningCurve(
            values=oriented(values, mode),
            train=losses if np.isfinite(losses).any() else None,
            kind="own",
            group=group,
            metric=name,
        )


def _train_loss(logged: list[Line], at: int, latest: float) -> float:
    """The training loss known at a line; of the same epoch, should it be logged on the next."""
    for line in (logged[at], *logged[at + 1 : at + 2]):
        same = line is logged[at] or _place(line) == _place(logged[at]) is not None
        for name in _TRAIN:
            if same and name in line:
                return line[name]
    return latest


def _place(line: Line) -> float | None:
    return next((line[name] for name in _PLACE if name in line), None)


def _lines(file: Path) -> Iterator[Line]:
    if file.suffix == ".csv":
        yield from _csv_lines(file)
    elif file.suffix == ".json":
        yield from _json_lines(file)
    elif _has_events(file):
        yield from _event_lines(file)


def _csv_lines(file: Path) -> Iterator[Line]:
    with file.open(newline="", encoding="utf-8", errors="replace") as stream:
        for row in csv.DictReader(stream, skipinitialspace=True):
            yield _numbers({k.strip(): v for k, v in row.items() if isinstance(k, str)})


def _json_lines(file: Path) -> Iterator[Line]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        yield from (_numbers(line) for line in content["log_history"] if isinstance(line, dict))
    elif isinstance(content, dict):
        columns = {k: v for k, v in content.items() if isinstance(v, list)}
        for i in range(max(map(len, columns.values()), default=0)):
            yield _numbers({k: v[i] for k, v in columns.items() if i < len(v)})


def _has_events(file: Path) -> bool:
    return file.name.startswith("events.out.tfevents")


def _event_lines(file: Path) -> Iterator[Line]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError as error:
        raise ImportError(f"to read {file}: pip install tensorboard") from error

    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    events.Reload()
    steps: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            steps.setdefault(event.step, {"step": float(event.step)})[tag] = float(event.value)
    yield from (steps[step] for step in sorted(steps))


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in line.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):  # an empty field, or words
            continue
    return numbers
