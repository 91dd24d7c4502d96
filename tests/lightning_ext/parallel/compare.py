"""Starts ranks, and compares what they found with one process."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lightning_ext.parallel.cases import Case

_FITTED: dict[str, tuple[Any, dict[str, float]]] = {}


def run(folder: Path, names: Iterable[str], world: int = 4, timeout: float = 1500.0) -> Path:
    """Run cases and jobs on real ranks, all in the same processes."""
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(world), "-m", "tests.lightning_ext.parallel.ranks"]
    done = subprocess.run(
        [*launch, str(folder), *names], capture_output=True, text=True, timeout=timeout
    )
    raised = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    assert done.returncode == 0, "\n".join(raised)[-6000:] or done.stderr[-6000:]
    return folder


def read(folder: Path, name: str) -> Any:
    """What a case or job has written."""
    return torch.load(folder / f"{name}.pt", weights_only=True)


def alone(case: Case) -> tuple[Any, dict[str, float]]:
    """The same fit on one process: the module and its metrics."""
    key = repr(case.alone)
    if key not in _FITTED:
        module, trainer = case.module(), case.trainer(devices=1)
        trainer.fit(module)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        _FITTED[key] = module, metrics
    return _FITTED[key]


def limits(case: Case) -> tuple[dict[str, float], dict[str, float], float]:
    """How far losses, norms and parameters may be from one process.

    In bfloat16, which has 8 bits, each rank rounds its part of a sum before the parts meet, so that
    a loss may be off by 2**-8 of itself. Adam turns the rounding of small gradients into steps of
    the full rate, 0.01; how far parameters come apart then says nothing.
    """
    exact: dict[str, float] = {"abs": 1e-10, "rel": 0}
    return {
        "64-true": (exact, exact, 1e-10),
        "32-true": ({"abs": 1e-5, "rel": 0}, {"rel": 1e-4}, 1e-3),
        "bf16-mixed": ({"rel": 2**-8}, {"rel": 2**-6}, math.inf),
    }[case.options.get("precision", "64-true")]


def without_effect(module: Any, name: str) -> Tensor:
    """Where the gradient of a parameter is zero but for rounding, which Adam blows up to steps.

    A bias of the keys adds the same to all scores of a query, which softmax takes away again.
    """
    value = module.state_dict()[name]
    mask = torch.zeros_like(value, dtype=torch.bool)
    if name.endswith(("c_attn.bias", "qkv.bias", "in_proj_bias")):
        mask.chunk(3)[1].fill_(True)
    return mask | (name.endswith(("self.key.bias", "k_proj.bias")))


def check(case: Case, found: dict[str, Any]) -> None:
    """Losses, norms, metrics and weights are those of one process, on every rank."""
    module, metrics = alone(case)
    losses, norms, weights = limits(case)
    assert not found["different"]
    assert found["dtypes"] == sorted(module.dtypes)
    for theirs in found["ranks"]:
        assert theirs == found["ranks"][0]  # to the last digit
    measured, seen, norm = found["ranks"][0]
    assert seen == pytest.approx(module.seen, **losses)
    assert norm == pytest.approx(module.norms, **norms)
    assert measured == pytest.approx(metrics, **losses)
    assert list(found["state"]) == list(module.state_dict())
    for name, value in module.state_dict().items():
        far = (found["state"][name] - value).abs()
        limit = torch.where(without_effect(module, name), 10 * weights, weights)
        assert (far < limit).all(), name  # not a number is never less
