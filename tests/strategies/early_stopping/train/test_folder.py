"""Files that the trainers themselves write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategies.early_stopping.train.curves import LearningCurve
from strategies.early_stopping.train.folder import read_folder

LOSSES = [1.0, 0.5, 0.25, 0.2]
TRAIN = [2.0, 1.0, 0.5, 0.1]


def one(folder: Path, metric: str) -> LearningCurve:
    (found,) = [c for c in read_folder(folder) if c.metric == metric]
    return found


def check(found: LearningCurve, sign: int = -1) -> None:
    np.testing.assert_allclose(found.values, sign * np.array(LOSSES), rtol=1e-6)
    assert found.train is not None
    np.testing.assert_allclose(found.train, -np.array(TRAIN), rtol=1e-6)


def test_lightning(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path, name="project", version="a")
    for epoch in range(4):
        logger.log_metrics({"epoch": epoch, "lr": 0.1, "val_loss": LOSSES[epoch]}, step=epoch)
        logger.log_metrics({"epoch": epoch, "train_loss": TRAIN[epoch]}, step=epoch)
    logger.save()
    found = one(tmp_path, "val_loss")
    check(found)
    assert found.group == "project"


def test_keras(tmp_path: Path) -> None:
    lines = ["epoch,accuracy,loss,val_accuracy,val_loss"]
    lines += [f"{e},0.5,{TRAIN[e]},{LOSSES[e]},{LOSSES[e]}" for e in range(4)]
    (tmp_path / "run.csv").write_text("\n".join(lines))
    check(one(tmp_path, "val_loss"))
    check(one(tmp_path, "val_accuracy"), sign=1)


def test_keras_history(tmp_path: Path) -> None:
    history = {"loss": TRAIN, "val_loss": LOSSES, "lr": [0.1] * 4}
    (tmp_path / "history.json").write_text(json.dumps(history))
    check(one(tmp_path, "val_loss"))


def test_what_a_callback_forecast_is_no_metric(tmp_path: Path) -> None:
    names = ("val_loss", "val_loss_p_improve", "val_loss_expected_best")
    (tmp_path / "history.json").write_text(json.dumps(dict.fromkeys(names, LOSSES)))
    assert [curve.metric for curve in read_folder(tmp_path)] == ["val_loss"]


def test_transformers(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for e in range(4):
        lines += [{"epoch": e, "loss": TRAIN[e]}, {"epoch": e, "eval_loss": LOSSES[e]}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": lines}))
    check(one(tmp_path, "eval_loss"))


def test_ultralytics(tmp_path: Path) -> None:
    lines = ["   epoch,  train/box_loss,  metrics/mAP50-95(B),  val/box_loss"]
    lines += [f"  {e},  {TRAIN[e]},  {LOSSES[e]},  {LOSSES[e]}" for e in range(4)]
    (tmp_path / "results.csv").write_text("\n".join(lines))
    check(one(tmp_path, "val/box_loss"))
    check(one(tmp_path, "metrics/mAP50-95(B)"), sign=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "project"))
    for e in range(4):
        for tag, value in (("train_loss", TRAIN[e]), ("val_loss", LOSSES[e])):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=e, summary=summary))
    writer.close()
    check(one(tmp_path, "val_loss"))


def test_what_is_missing_is_a_hole_or_the_last_value_known(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,val_loss,train_loss\n1,,3\n2,1,\n3,nan,2\n4,words,\n")
    found = one(tmp_path, "val_loss")
    np.testing.assert_array_equal(found.values, [-1.0, np.nan])
    np.testing.assert_array_equal(found.train, [-3.0, -2.0])


def test_broken_files_and_other_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("[1, 2]")
    (tmp_path / "c.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.txt").write_text("val_loss")
    with pytest.raises(ValueError, match="no validation metrics were found below"):
        read_folder(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        read_folder(tmp_path / "nowhere")
