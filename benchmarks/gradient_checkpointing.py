"""What holding fewer activations saves and costs: planned, by torch's own tools, and by rules.

    python -m benchmarks.gradient_checkpointing [--quick] [--out DIR]

`benchmarks/README.md` describes it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._gradient_checkpointing_overhead import overhead
from benchmarks._gradient_checkpointing_torch import (
    VOCABULARY,
    compiled,
    measure,
    methods,
    timed,
)
from benchmarks._setting import arguments_of, setting, write
from benchmarks._stats import median_ratio

RESULTS = Path(__file__).parent / "results"


def run(quick: bool) -> dict[str, Any]:
    """All figures."""
    torch.set_num_threads(1)
    blocks, width, rounds = (4, 32, 2) if quick else (24, 128, 15)
    tokens = torch.randint(VOCABULARY, (4, 16) if quick else (8, 128))
    contestants = methods(blocks, width, tokens, quick)
    rows = [measure(contestants[0], tokens, None)]
    gradients = rows[0].pop("gradients")
    for method in contestants[1:]:
        rows.append(measure(method, tokens, gradients))
        rows[-1].pop("gradients")
    times = timed(contestants, tokens, rounds)
    for row in rows:
        row["seconds"] = times[row["name"]]
        row["ratio"] = statistics.median(
            a / b for a, b in zip(times[row["name"]], times["plain"], strict=True)
        )
    budgets = (0.5,) if quick else (0.8, 0.6, 0.5, 0.4, 0.2)
    steps, warmup = (4, 2) if quick else (200, 20)
    walls = [overhead(blocks, width // 2, steps, warmup) for _ in range(1 if quick else 3)]
    bare = [wall["bare"] for wall in walls]
    return {
        "methods": rows,
        "partitioner": compiled(width, blocks, tokens, budgets),
        "overhead": {
            name: median_ratio([wall[name] for wall in walls], bare)
            for name in walls[0]
            if name != "bare"
        },
    }


def report(results: dict[str, Any]) -> str:
    """The tables."""
    plain = results["methods"][0]
    lines = [
        "A transformer of 24 blocks, width 128, with dropout; 8 texts of 128 tokens; forward and",
        "backward pass on one thread. Memory is all that torch took beyond parameters and batch,",
        "gradients of parameters included, counted at every operator. Operations are those of",
        "matrix products and attention in the whole step.",
        "",
        "| | memory, MiB | of plain | operations beyond plain | time | gradients |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in results["methods"]:
        lines.append(
            f"| {row['name']} | {row['peak'] / 2**20:.1f} | {row['peak'] / plain['peak']:.1%} "
            f"| {row['flops'] / plain['flops'] - 1:.1%} | {row['ratio']:.3f} "
            f"| {'equal bit for bit' if row['same'] else 'differ'} |"
        )
    lines += [
        "",
        "torch's own partitioner (`activation_memory_budget`, compiled for",
        "`aot_eager_decomp_partition`, without dropout), against itself at a budget of 1:",
        "",
        "| budget | saved, MiB | of budget 1 | time |",
        "|---:|---:|---:|---:|",
    ]
    whole = results["partitioner"][0]
    for row in results["partitioner"]:
        lines.append(
            f"| {row['budget']:.0%} | {row['saved'] / 2**20:.1f} "
            f"| {row['saved'] / whole['saved']:.1%} | {row['seconds'] / whole['seconds']:.3f} |"
        )
    lines += [
        "",
        "Steps of `Trainer.fit` where nothing needs to be run again, with the callback against",
        "without, width 64, in turns (95% interval):",
        "",
        "| | time |",
        "|---|---:|",
    ]
    for name, (estimate, low, high) in results["overhead"].items():
        lines.append(f"| {name} | {estimate:.4f} ({low:.4f}-{high:.4f}) |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results."""
    options = arguments_of(__doc__).parse_args(arguments)
    out = options.out or (None if options.quick else RESULTS)
    before = setting()
    results = {"run": before, **run(options.quick)}
    write(results, report(results), out, "gradient_checkpointing")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
