"""Step time with `LayerwiseLRDecay` over the bare fit, framework by framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._stats import median_ratio

DECAY = 0.75
BARE = "bare"
FRAMEWORKS = ("lightning", "keras-torch", "keras-tensorflow", "keras-jax")
# One thread for each framework: what is measured is the work, not how well it spreads.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}


@dataclass(frozen=True)
class Shape:
    """A vision transformer and its batch of square images."""

    width: int
    heads: int
    batch: int
    image: int = 32
    patch: int = 8
    blocks: int = 24


SHAPES = {
    "24 blocks, width 192": Shape(width=192, heads=3, batch=8),
    "24 blocks, width 64 (worst case)": Shape(width=64, heads=1, batch=8),
}
QUICK_SHAPES = {"2 blocks, width 16 (smoke run)": Shape(16, 1, batch=2, image=8, blocks=2)}


@dataclass(frozen=True)
class Case:
    """A network and an optimizer in one framework."""

    framework: str
    model: str
    optimizer: str

    @property
    def shape(self) -> Shape:
        """The network's."""
        return (SHAPES | QUICK_SHAPES)[self.model]

    @property
    def smoke(self) -> bool:
        """Whether this only shows that it runs."""
        return self.model in QUICK_SHAPES


@dataclass(frozen=True)
class Plan:
    """How much is timed: `steps` steps of each contestant, spread over several processes."""

    steps: int = 240
    warmup: int = 5
    quick: bool = False

    def processes(self, framework: str) -> int:
        """Number of processes; tracing and compiling takes minutes where there is any."""
        if self.quick:
            return 1
        return 2 if framework in ("keras-tensorflow", "keras-jax") else 4

    def cases(self, framework: str) -> Iterator[Case]:
        """The cases of a framework."""
        several = framework == "lightning" and not self.quick
        kinds = ("AdamW", "AdamW, foreach", "AdamW, fused") if several else ("AdamW",)
        for model in QUICK_SHAPES if self.quick else SHAPES:
            for optimizer in kinds:
                yield Case(framework, model, optimizer)


QUICK = Plan(steps=4, warmup=1, quick=True)


def measure(plan: Plan, frameworks: Sequence[str] = FRAMEWORKS) -> list[dict[str, Any]]:
    """Time all cases in processes of their own and summarise them.

    Args:
        plan: How much is timed.
        frameworks: Which of `FRAMEWORKS`. Default: all.
    """
    jobs = [(f, seed) for f in frameworks for seed in range(plan.processes(f))]
    # A smoke run needs no quiet machine, so it may run two at a time.
    with ThreadPoolExecutor(2 if plan.quick else 1) as pool:
        results = list(pool.map(lambda job: _work(plan, *job), jobs))
    summaries = []
    for framework in frameworks:
        runs = [r for (f, _), r in zip(jobs, results, strict=True) if f == framework]
        for i, case in enumerate(plan.cases(framework)):
            summaries.append(summarise(case, [run[i] for run in runs]))
    return summaries


def _work(plan: Plan, framework: str, seed: int) -> list[dict[str, Any]]:
    """What one process measured, by case."""
    name, _, backend = framework.partition("-")
    worker = f"benchmarks._layerwise_steps_{name}"
    environment = {**os.environ, **_ONE_THREAD, "KERAS_BACKEND": backend or "torch"}
    settings = {
        "cases": [asdict(case) for case in plan.cases(framework)],
        "steps": plan.steps // plan.processes(framework),
        "warmup": plan.warmup,
        "seed": seed,
    }
    print(f"step time: {framework}, process {seed + 1} of {plan.processes(framework)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "times.json"
        subprocess.run(
            [sys.executable, "-m", worker, json.dumps(settings), str(target)],
            env=environment,
            check=True,
        )
        return json.loads(target.read_text())


def serve(run: Callable[[Case, int, int, int], dict[str, Any]], arguments: Sequence[str]) -> None:
    """The worker's side: run the cases that `_work` asked for and leave their times.

    Args:
        run: Gets case, steps, warm-up steps and seed.
        arguments: The command line.
    """
    settings = json.loads(arguments[0])
    numbers = settings["steps"], settings["warmup"], settings["seed"]
    results = [run(Case(**case), *numbers) for case in settings["cases"]]
    Path(arguments[1]).write_text(json.dumps(results))


def summarise(case: Case, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios to the bare fit, from what each process measured.

    Args:
        case: What was timed.
        runs: For each process, seconds by contestant as `wall` and `cpu`.
    """
    ratios = {}
    for name in runs[0]["wall"]:
        wall = [run["wall"][name] for run in runs]
        bare = [run["wall"][BARE] for run in runs]
        estimate = median_ratio(wall, bare)
        cpu = median_ratio([r["cpu"][name] for r in runs], [r["cpu"][BARE] for r in runs])
        pairs = zip(wall, bare, strict=True)
        ratios[name] = {
            "median_ms": round(1e3 * float(np.median(np.concatenate(wall))), 3),
            "ratio": [round(x, 5) for x in estimate],
            "cpu_ratio": [round(x, 5) for x in cpu],
            "by_process": [round(median_ratio([w], [b], 1).estimate, 5) for w, b in pairs],
        }
    raw = {
        f"{clock}_ms": {
            name: [[round(1e3 * t, 2) for t in run[clock][name]] for run in runs] for name in ratios
        }
        for clock in ("wall", "cpu")
    }
    extra = {key: value for key, value in runs[0].items() if key not in ("wall", "cpu")}
    return {**asdict(case), "shape": asdict(case.shape), **extra, "contestants": ratios, **raw}
