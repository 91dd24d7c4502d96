"""However processes are started, ranks lie as in Megatron and losses are those of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.lightning_ext.parallel.launched import fit

MODULE = "tests.lightning_ext.parallel.launched"
# What launchers set; none of it may come from where the tests themselves run.
LAUNCHERS = ("SLURM", "MASTER_", "TORCHELASTIC", "WORLD_SIZE", "RANK", "LOCAL_", "GROUP_", "NODE_")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(commands: Sequence[tuple[list[str], dict[str, str]]]) -> None:
    """Run processes side by side, each with its environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            env=clean | own,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command, own in commands
    ]
    try:
        for process in started:
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0, output[-6000:]
    finally:
        for process in started:
            process.kill()


@cache
def losses() -> list[float]:
    """Of one process."""
    return fit(devices=1).seen


def check(folder: Path, environment: str, nodes: int, devices: int) -> None:
    world = nodes * devices
    for rank in range(world):
        found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
        assert found.pop("seen") == pytest.approx(losses(), abs=1e-12)
        stage, data = divmod(rank, world // 2)
        assert found == {
            "environment": environment, "rank": rank, "node": rank // devices,
            "local": rank % devices, "world": world, "zero": rank == 0,
            "at": {"pipeline": stage, "data": data, "tensor": 0},
        }  # fmt: skip


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_two_nodes(devices: int, tmp_path: Path) -> None:
    port = str(free_port())
    launch = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(devices)]
    launch += ["--master-addr", "127.0.0.1", "--master-port", port]
    run([
        ([*launch, "--node-rank", str(node), "-m", MODULE, str(tmp_path), "2", str(devices)], {})
        for node in range(2)
    ])  # fmt: skip
    check(tmp_path, "TorchElasticEnvironment", nodes=2, devices=devices)


@pytest.mark.matrix
def test_slurm(tmp_path: Path) -> None:
    job = {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "training", "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2", "SLURM_NODELIST": "localhost",
        "SLURM_STEP_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    ranks = ({"SLURM_PROCID": str(r), "SLURM_NODEID": str(r)} for r in range(2))
    command = ["-m", MODULE, str(tmp_path), "2", "1"]
    run([(command, job | rank | {"SLURM_LOCALID": "0"}) for rank in ranks])
    check(tmp_path, "SLURMEnvironment", nodes=2, devices=1)
