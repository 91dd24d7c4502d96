"""Two real ranks on gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


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
