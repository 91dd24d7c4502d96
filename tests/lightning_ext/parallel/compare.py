"""Starts ranks, and compares what they found with one process."""

from __future__ import annotations

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


def limits(case: Case) -> tuple[float, float, float | None]:
    """How far losses, norms (relative) and parameters may be from one process.

    In single precision Adam turns the rounding of small gradients into steps of its full rate, so
    that parameters are compared in double precision only. In bfloat16, which has 8 bits, each
    rank rounds its part of a sum before the parts meet: 2**-8 of what is summed.
    """
    return {
        "64-true": (1e-10, 1e-10, 1e-10),
        "32-true": (1e-5, 1e-4, None),
        "bf16-mixed": (2**-8 * 11, 2**-4, None),
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
    for theirs in found["ranks"]:
        assert theirs == found["ranks"][0]  # to the last digit
    measured, seen, norm = found["ranks"][0]
    assert seen == pytest.approx(module.seen, abs=losses, rel=0)
    assert norm == pytest.approx(module.norms, rel=norms, abs=norms)
    assert measured == pytest.approx(metrics, abs=losses, rel=0)
    assert list(found["state"]) == list(module.state_dict())
    for name, value in module.state_dict().items():
        assert found["state"][name].isfinite().all(), name
        if weights is not None:
            far = (found["state"][name] - value).abs()
            noise = without_effect(module, name)
            assert far[~noise].amax() < weights if (~noise).any() else True, name
            assert far[noise].amax() < 10 * weights if noise.any() else True, name
