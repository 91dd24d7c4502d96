"""What `LayerwiseLRDecay` costs per step, and what it gains in fine-tuning.

    python -m benchmarks.layerwise_lr_decay [--part step|gain|all] [--quick] [--out DIR]

`benchmarks/README.md` describes both parts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _layerwise_gain as gain
from benchmarks import _layerwise_steps as step
from benchmarks._layerwise_tables import report
from benchmarks._setting import arguments_of, setting, write

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and write the results."""
    options = parse(arguments)
    out = options.out or (None if options.quick else RESULTS)
    results = read(out)
    for part in ("step", "gain"):
        if options.part not in (part, "all"):
            continue
        before = setting()
        if part == "step":
            results["step"] = merged(results.get("step", {}), measure_steps(options))
        else:
            results["gain"] = gain.measure(gain.QUICK if options.quick else gain.Plan())
        after = setting()
        results[part]["run"] = {**before, "load_after": after["load_before"], "end": after["date"]}
    write(results, report(results), out, "layerwise_lr_decay")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments_of(__doc__)
    parser.add_argument("--part", choices=("step", "gain", "all"), default="all")
    parser.add_argument(
        "--framework",
        choices=step.FRAMEWORKS,
        nargs="+",
        default=step.FRAMEWORKS,
        help="time the steps of these only, and keep the other results",
    )
    return parser.parse_args(arguments)


def measure_steps(options: argparse.Namespace) -> dict[str, Any]:
    plan = step.QUICK if options.quick else step.Plan()
    return {"decay": step.DECAY, "cases": step.measure(plan, options.framework)}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """New cases in place of old ones of the same framework."""
    measured = {case["framework"] for case in new["cases"]}
    kept = [case for case in old.get("cases", []) if case["framework"] not in measured]
    order = {name: i for i, name in enumerate(step.FRAMEWORKS)}
    cases = sorted(kept + new["cases"], key=lambda case: order[case["framework"]])
    return {**new, "cases": cases}


def read(out: Path | None) -> dict[str, Any]:
    """Earlier results, so that a run of one part keeps the other."""
    file = out / "layerwise_lr_decay.json" if out else None
    return json.loads(file.read_text()) if file and file.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
