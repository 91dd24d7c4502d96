"""What comes out on pipeline x data x tensor ranks is what comes out on one process."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning_ext.parallel.cases import FULL, QUICK, Case, everything
from tests.lightning_ext.parallel.models import Module


def run(folder: Path, names: list[str]) -> Path:
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "4", "-m", "tests.lightning_ext.parallel.ranks", str(folder)]
    done = subprocess.run([*launch, *names], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("quick"), [*QUICK, "resume", "callbacks", "dropout"])


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("full"), list(FULL))


@cache
def alone(
    kind: str, blocks: int, items: int, options: tuple[tuple[str, Any], ...]
) -> tuple[Module, Any]:
    case = Case(kind, {}, dict(options), blocks, items)
    module, trainer = case.module(), case.trainer(devices=1)
    trainer.fit(module)
    return module, trainer.callback_metrics


def check(case: Case, found: dict[str, Any]) -> None:
    module, metrics = alone(case.kind, case.blocks, case.items, tuple(case.options.items()))
    exact = case.options.get("precision", "64-true") == "64-true"
    for theirs, seen in found["ranks"]:
        assert (theirs, seen) == found["ranks"][0]  # to the last digit, on all ranks
        assert seen == pytest.approx(module.seen, abs=1e-12 if exact else 1e-5)
        expected = {name: float(value) for name, value in metrics.items()}
        assert theirs == pytest.approx(expected, abs=1e-10 if exact else 1e-5)
    assert list(found["state"]) == list(module.state_dict())
    for name, value in module.state_dict().items():
        # A bias of keys changes nothing: its gradient is rounding, which Adam blows up.
        noise = name.endswith(("c_attn.bias", "qkv.bias"))
        if exact or not noise:
            limit = (1e-9 if noise else 1e-10) if exact else 2e-3
            assert (found["state"][name] - value).abs().max() < limit, name


@pytest.mark.parametrize("name", list(QUICK))
def test_quick(name: str, quick: Path) -> None:
    check(QUICK[name], torch.load(quick / f"{name}.pt", weights_only=True))


@pytest.mark.matrix
@pytest.mark.parametrize("name", list(FULL))
def test_full(name: str, full: Path) -> None:
    check(FULL[name], torch.load(full / f"{name}.pt", weights_only=True))


def test_resumed_and_loaded_by_one_process(quick: Path) -> None:
    case = QUICK["stages and pieces"]
    module, _ = alone(case.kind, case.blocks, case.items, tuple(case.options.items()))
    found = torch.load(quick / "resumed.pt", weights_only=True)
    assert found["seen"] == pytest.approx(module.seen[4:], abs=1e-10)

    plain, trainer = case.module(), case.trainer(devices=1)
    trainer.fit(plain, ckpt_path=quick / "half.ckpt")
    # Lightning itself loads into single precision before it converts to double.
    assert plain.seen == pytest.approx(module.seen[4:], abs=1e-6)
    (tested,) = trainer.validate(plain, ckpt_path=quick / "half.ckpt", verbose=False)
    assert tested["val_loss"] == pytest.approx(found["val_loss"], abs=1e-12)


def test_callbacks_act_as_on_one_process(quick: Path, tmp_path: Path) -> None:
    first, *others = torch.load(quick / "callbacks.pt", weights_only=True)
    assert all(other == first for other in others)
    expected = everything(tmp_path, devices=1)
    for name in ("seen", "test_loss"):
        assert first.pop(name) == pytest.approx(expected.pop(name), abs=1e-10)
    assert first == expected


def test_ranks_that_share_tensors_drop_the_same_units(quick: Path) -> None:
    first, *others = torch.load(quick / "dropout.pt", weights_only=True)
    assert all(torch.equal(other, first) for other in others)
