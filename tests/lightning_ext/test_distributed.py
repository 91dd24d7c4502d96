"""Two real ranks on gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.lightning_ext.curves import flat


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.matrix)])
def test_ranks_agree_and_equal_permanently_split_groups(strategy: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "-m", "tests.lightning_ext.ddp_layerwise"]
    done = subprocess.run(
        [*launch, strategy, str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [torch.load(tmp_path / f"rank{r}.pt", weights_only=True) for r in range(2)]
    for name, value in ranks[0]["ours"].items():
        assert torch.equal(value, ranks[1]["ours"][name]), name
        assert torch.equal(value, ranks[0]["hand"][name]), name


def test_ranks_stop_together_by_the_mean_of_their_metrics(tmp_path: Path) -> None:
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", "2", "-m", "tests.lightning_ext.ddp_early_stopping"]
    done = subprocess.run([*launch, str(tmp_path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2)]
    messages = [rank.pop("message") for rank in ranks]
    assert "monitor='val_loss' is logged on some ranks only" in messages[0]
    assert "monitor='val_loss' is not logged" in messages[1]
    assert ranks[0] == ranks[1]
    steps = [3 * (n + 1) for n in range(len(ranks[0]["values"]["values"]))]
    assert ranks[0]["values"]["values"] == pytest.approx([flat(step) for step in steps])
    assert ranks[0]["step"] == steps[-1] < 90
    assert [action for _, action, _ in ranks[0]["decisions"]] == ["stop"]
    straight, *resumed = ranks[0]["resumed"]
    assert len(straight["train_values"]) == 5
    for values in resumed:
        for name in ("values", "train_values"):
            assert values[name] == pytest.approx(straight[name], rel=1e-6), name
