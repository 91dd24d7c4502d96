"""Metric objects and running statistics on ranks are those of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_ext import _compat
from lightning_ext.parallel.logs import Record
from tests.lightning_ext.parallel.measured import LAYOUTS, measure
from tests.lightning_ext.parallel.normalized import in_a_loop


def path_of(metric: nn.Module) -> str:
    return "a.metric"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics")
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "4", "-m", "tests.lightning_ext.parallel.measured", str(folder)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return measure(devices=1)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_as_on_one_process(name: str, folder: Path, expected: dict[str, Any]) -> None:
    first, *others = torch.load(folder / f"{name}.pt", weights_only=True)
    data = 4 // (LAYOUTS[name].get("pipeline", 1) * LAYOUTS[name].get("tensor", 1))
    assert {"accuracy_epoch", "train_f1", "area", "val_area", "val_recall"} <= set(first["fitted"])
    for other in others:
        if data == 1:
            assert {**other, "kept": 0} == {**first, "kept": 0}
        else:
            for key in ("fitted", "steps", "ranges"):
                assert skipped(other[key]) == skipped(first[key])
    for key in ("fitted", "tested"):
        assert skipped(first[key]) == pytest.approx(skipped(expected[key]), abs=1e-6)
    for key in ("steps", "ranges"):
        for mine, theirs in zip(first[key], expected[key], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-6)
    if data == 1:
        # Sum and count of what each of the four microbatches added.
        fourfold = {key: 4 * value for key, value in expected["kept"].items()}
        assert first["kept"] == pytest.approx(fourfold, rel=1e-6)
    # Names are sent once, not with each of the four steps.
    assert first["objects"] == (0 if name == "data" else 1)


def skipped(values: Any) -> Any:
    """Without what Lightning takes from the batch that a rank itself has seen."""
    if not isinstance(values, dict):
        return values
    return {k: v for k, v in values.items() if not k.startswith("val_accuracy_step")}


def test_running_statistics_are_those_of_the_microbatches_of_the_first_copy(folder: Path) -> None:
    expected = in_a_loop()
    first, *others = torch.load(folder / "normalized.pt", weights_only=True)
    for found in (first, *others):
        assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=1e-10)
    assert set(first["state"]) == set(expected["state"])
    for name, value in expected["state"].items():
        assert (first["state"][name] - value).abs().max() < 1e-10, name


class TestRecord:
    def test_reductions_over_microbatches(self) -> None:
        record = Record(path_of)
        for value in (1, 2, 6):
            record("mean", value)
            record("sum", torch.tensor([value]), reduce_fx=torch.sum, batch_size=2)
            record("max", float(value), True, False, reduce_fx="MAX")
            record("min", torch.tensor(value, dtype=torch.bfloat16), reduce_fx=min)
        mean, total, largest, least = record.combined()
        assert (mean.value, mean.value.dtype) == (3, torch.float64)  # type: ignore[union-attr]
        assert (total.value, total.value.dtype) == (9, torch.int64)  # type: ignore[union-attr]
        assert total.options == {"reduce_fx": "sum", "batch_size": 6}
        assert (largest.value, largest.options) == (
            6, {"reduce_fx": "max", "prog_bar": True, "logger": False}
        )  # fmt: skip
        assert (least.value, least.value.dtype) == (1, torch.bfloat16)  # type: ignore[union-attr]

    def test_what_cannot_be_logged(self) -> None:
        with pytest.raises(ValueError, match="a tensor of 3 elements, but takes a single one"):
            Record(path_of)("a", torch.ones(3))
        with pytest.raises(ValueError, match="is not one of mean, sum, max, min; for others log a"):
            Record(path_of)("a", 1.0, reduce_fx=torch.std)


def test_the_private_name_of_torchmetrics() -> None:
    metric = MeanMetric()
    metric(torch.tensor([1.0, 3.0]))
    metric(torch.tensor([7.0]))
    assert _compat.batch_value(metric) == 7
    _compat.set_batch_value(metric, torch.tensor(5.0))
    assert (_compat.batch_value(metric), metric._forward_cache) == (5, 5)
    metric.reset()
    assert _compat.batch_value(metric) is None
