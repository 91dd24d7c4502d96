"""What a step of `ThreeDParallelStrategy` takes against a script in torch of the same layout.

    python -m benchmarks.three_d_parallel [--quick] [--out DIR]

`benchmarks/README.md` describes it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._setting import arguments_of, setting, write
from benchmarks._stats import median_ratio

RESULTS = Path(__file__).parent / "results"
LAYOUTS = ((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4))


def plan(quick: bool) -> list[dict[str, Any]]:
    """The cases: each layout at two widths."""
    size = {"blocks": 8, "heads": 8, "vocabulary": 512, "length": 64, "items": 16}
    if quick:
        return [_case((2, 1, 2), 32, size | {"blocks": 2, "length": 8}, 6, 1)]
    return [_case(layout, width, size, 45, 5) for width in (64, 256) for layout in LAYOUTS]


def _case(
    layout: tuple[int, int, int], width: int, size: dict[str, int], steps: int, warmup: int
) -> dict[str, Any]:
    count = 2 * layout[0]
    return {
        "layout": layout, "width": width, **size, "microbatches": count,
        "steps": steps, "warmup": warmup,
    }  # fmt: skip


def measure(cases: list[dict[str, Any]], processes: int) -> list[dict[str, Any]]:
    """Run all cases in several starts of four ranks each."""
    runs = [_ranks(cases) for _ in range(processes)]
    found = []
    for per_case in zip(*runs, strict=True):
        ours = [[a for a, _ in run["times"]] for run in per_case]
        theirs = [[b for _, b in run["times"]] for run in per_case]
        first = {k: v for k, v in per_case[0].items() if k not in ("times", "apart")}
        found.append(
            {
                **first,
                "apart": max(run["apart"] for run in per_case),
                "ratio": median_ratio(ours, theirs),
                "ours_ms": _milliseconds(ours),
                "theirs_ms": _milliseconds(theirs),
            }
        )
    return found


def _milliseconds(runs: list[list[float]]) -> float:
    return 1e3 * statistics.median(seconds for run in runs for seconds in run)


def _ranks(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "plan.json", Path(folder) / "out.json"
        asked.write_text(json.dumps(cases))
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "4", "-m", "benchmarks._three_d_ranks"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(asked), str(answer)],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        return list(json.loads(answer.read_text()))


def report(results: dict[str, Any]) -> str:
    """The table."""
    run = results["run"]
    lines = [
        "Step time of `ThreeDParallelStrategy` against a script in torch alone of the same layout,",
        f"four gloo ranks on {run['cores']} cores, one thread each, torch "
        f"{run['versions']['torch']}.",
        "",
        "| pipeline x data x tensor | width | ours, ms | script, ms | ratio (95%) | losses apart |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case in results["cases"]:
        estimate, low, high = case["ratio"]
        lines.append(
            f"| {' x '.join(map(str, case['layout']))} | {case['width']} | {case['ours_ms']:.0f} "
            f"| {case['theirs_ms']:.0f} | {estimate:.3f} ({low:.3f}-{high:.3f}) "
            f"| {case['apart']:.0e} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results."""
    options = arguments_of(__doc__).parse_args(arguments)
    out = options.out or (None if options.quick else RESULTS)
    before = setting()
    results = {
        "run": before,
        "cases": measure(plan(options.quick), 1 if options.quick else 2),
    }
    write(results, report(results), out, "three_d_parallel")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
