"""What goes wrong on one rank is said on all, and soon."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ext import _torch
from lightning_ext.parallel.checks import checksum
from lightning_ext.parallel.faults import Faults
from tests.lightning_ext.parallel.failing import CASES


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("faults")
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "4", "-m", "tests.lightning_ext.parallel.failing", str(folder)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return {
        where: [json.loads((folder / f"{where}.{rank}.json").read_text()) for rank in range(4)]
        for where in CASES
    }


def check(ranks: Sequence[dict[str, Any]], guilty: Sequence[int], kind: str, message: str) -> None:
    """The guilty raise their own error, the others one that names them."""
    assert max(r["caught"] for r in ranks) - max(r["raised"] for r in ranks) < 10
    reasons = [f"rank {rank} (stage {rank // 2}): {kind}: {message}" for rank in guilty]
    for rank, said in enumerate(ranks):
        if rank in guilty:
            assert (said["kind"], message in said["message"]) == (kind, True), said
        else:
            assert said["kind"] == "RuntimeError", said
            assert any(said["message"].startswith(reason) for reason in reasons), said


@pytest.mark.parametrize("where", ["training_step", "stage", "backward", "validation", "hook"])
def test_an_error_of_the_user(where: str, found: dict[str, list[dict[str, Any]]]) -> None:
    check(found[where], CASES[where], "KeyError", f"'{where} went wrong'")
    assert found[where][CASES[where][0]]["frames"][-1] == "maybe"  # its own traceback


def test_parameters_of_other_stages_in_a_loss(found: dict[str, list[dict[str, Any]]]) -> None:
    check(found["penalty"], CASES["penalty"], "NotImplementedError", "Cannot copy out of meta")
    for said in found["penalty"]:
        assert "of other stages have no values here" in said["message"]


def test_a_process_that_is_interrupted(found: dict[str, list[dict[str, Any]]]) -> None:
    ranks = found["interrupt"]
    assert ranks[1]["kind"] == "SystemExit"  # Lightning's way
    for rank in (0, 2, 3):
        assert ranks[rank]["message"].startswith("rank 1 (stage 0): KeyboardInterrupt"), ranks


def test_a_second_fit_after_a_failure(found: dict[str, list[dict[str, Any]]]) -> None:
    for said in found["hook"]:
        assert said["again"].startswith("an earlier run has failed"), said


def test_a_step_that_calls_the_model_twice(found: dict[str, list[dict[str, Any]]]) -> None:
    message = "the step calls the pipelined module 'model' more than once"
    check(found["twice"], CASES["twice"], "RuntimeError", message)


def test_activations_of_another_shape_than_before(found: dict[str, list[dict[str, Any]]]) -> None:
    message = "stage 0 sends 2x6x16 torch.float32 for microbatch 0, but 2x8x16 torch.float32"
    check(found["shorter"], CASES["shorter"], "ValueError", message)


def test_ranks_that_built_another_model(found: dict[str, list[dict[str, Any]]]) -> None:
    for said in found["other model"]:
        assert said["kind"] == "ValueError", said
        assert said["message"].startswith("rank 1 has built another model than rank 0"), said


@pytest.mark.parametrize("where", ["shuffled", "shuffled validation"])
def test_ranks_of_a_copy_that_see_other_data(
    where: str, found: dict[str, list[dict[str, Any]]]
) -> None:
    ranks = found[where]
    assert {r["kind"] for r in ranks} == {"ValueError"}, ranks
    assert len({r["message"] for r in ranks}) <= 2  # of each copy
    message = ranks[0]["message"]
    assert message.startswith("rank 2 was given another batch than rank 0, but both work on the")
    assert "use_distributed_sampler=True" in message


class TestChecksum:
    @pytest.mark.parametrize(
        "other",
        [
            torch.arange(12).view(4, 3).flip(0),
            torch.arange(12).view(4, 3).flip(1),
            torch.arange(12).view(3, 4),
            torch.arange(12).view(4, 3).int(),
            torch.arange(12).view(4, 3) + 1,
        ],
    )
    def test_other_batches(self, other: torch.Tensor) -> None:
        batch = torch.arange(12).view(4, 3)
        assert checksum([batch, 1]) == checksum([batch.clone(), 1])
        assert checksum([other, 1]) != checksum([batch, 1])

    def test_everything_that_is_no_tensor(self) -> None:
        assert checksum({"a": ["x", 1.5, object()]}) == checksum({"a": ["x", 1.5, object()]})
        assert checksum({"a": ["x", 1.5]}) != checksum({"a": ["y", 1.5]})
        assert checksum([torch.ones(()), torch.ones(0, 2), torch.ones(2).bool()]) == checksum(
            [torch.ones(()), torch.ones(0, 2), torch.ones(2).bool()]
        )


def test_one_process_keeps_its_errors() -> None:
    faults = Faults()
    with pytest.raises(KeyError), faults.shared():
        raise KeyError("x")
    assert not faults.failed


def test_the_private_name_of_torch(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        store = _torch.default_store()
        store.set("a", "b")
        assert store.check(["a"])
        assert store.get("a") == b"b"
    finally:
        torch.distributed.destroy_process_group()
