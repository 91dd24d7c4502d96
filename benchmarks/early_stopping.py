"""What `PredictiveEarlyStopping` saves, and what it loses, against patience and other models.

    python -m benchmarks.early_stopping --data DIR [--part replay|growth|live|all] [--quick]

`benchmarks/README.md` describes the parts. DIR holds the curves; without it only `live` runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _early_stopping_live as live
from benchmarks import _early_stopping_replay as replay
from benchmarks._early_stopping_tables import report
from benchmarks._setting import dumps, setting

RESULTS = Path(__file__).parent / "results"
PARTS = ("replay", "growth", "live")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and write the results."""
    options = parse(arguments)
    out = options.out or (None if options.quick else RESULTS)
    file = out / "early_stopping.json" if out else None
    results: dict[str, Any] = json.loads(file.read_text()) if file and file.exists() else {}
    for part in PARTS:
        if options.part not in (part, "all"):
            continue
        if part != "live" and options.data is None:
            print(f"{part}: skipped, for --data DIR is not given")
            continue
        before = setting()
        results[part] = _measure(part, options)
        after = setting()
        results[part]["run"] = {**before, "load_after": after["load_before"], "end": after["date"]}
        if out:
            out.mkdir(parents=True, exist_ok=True)
            (out / "early_stopping.json").write_text(dumps(results))
            (out / "early_stopping.md").write_text(report(results))
    print(report(results))
    return 0


def _measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    if part == "live":
        return live.measure(seeds=1 if options.quick else 5, epochs=8 if options.quick else None)
    plan = replay.QUICK if options.quick else replay.Plan(keep=options.keep)
    if part == "replay":
        return replay.measure(options.data, plan)
    return replay.growth(options.data, plan)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of collected curves")
    parser.add_argument("--keep", type=Path, help="folder in which to keep simulated curves")
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--quick", action="store_true", help="a smoke run, for no figure")
    parser.add_argument("--out", type=Path, help="folder for the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
