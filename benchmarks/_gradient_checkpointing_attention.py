"""What attention that keeps no weights saves: the advice that a report of memory gives.

python -m benchmarks._gradient_checkpointing_attention [--quick] [--out DIR]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks._gradient_checkpointing_torch import (
    VOCABULARY,
    Attention,
    Method,
    Transformer,
    measure,
    timed,
)
from benchmarks._setting import arguments_of, setting, write

RESULTS = Path(__file__).parent / "results"


class ByHand(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(ahead, -math.inf).softmax(-1) @ v


def methods(blocks: int, width: int) -> list[Method]:
    """One model with its attention in three ways."""
    by_hand = Transformer(blocks, width)
    for module in by_hand.modules():
        if isinstance(module, Attention):
            module.__class__ = ByHand
    return [
        Method("softmax(QK^T)V by hand", by_hand),
        Method(
            "scaled_dot_product_attention, math kernel",
            Transformer(blocks, width),
            lambda: sdpa_kernel(SDPBackend.MATH),
        ),
        Method("scaled_dot_product_attention", Transformer(blocks, width)),
    ]


def run(quick: bool) -> list[dict[str, Any]]:
    """All figures."""
    torch.set_num_threads(1)
    blocks, width, rounds = (2, 32, 1) if quick else (6, 128, 10)
    rows = []
    for length in (16,) if quick else (128, 256, 512):
        tokens = torch.randint(VOCABULARY, (4, length))
        ways = methods(blocks, width)
        times = timed(ways, tokens, rounds)
        for way in ways:
            row = measure(way, tokens, None) | {"length": length}
            row["gradients"] = row["gradients"].norm().item()
            row["seconds"] = statistics.median(times[way.name])
            rows.append(row)
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        "A transformer of 6 blocks, width 128, 4 heads, with dropout outside of attention; 4",
        "texts; forward and backward pass on one thread. Memory is all that torch took beyond",
        "parameters and batch.",
        "",
        "| tokens | attention | memory, MiB | of by hand | time of by hand | loss |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    first = {row["length"]: row for row in reversed(rows)}
    for row in rows:
        base = first[row["length"]]
        lines.append(
            f"| {row['length']} | {row['name']} | {row['peak'] / 2**20:.1f} "
            f"| {row['peak'] / base['peak']:.1%} | {row['seconds'] / base['seconds']:.3f} "
            f"| {row['loss']:.6f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results."""
    options = arguments_of(__doc__).parse_args(arguments)
    out = options.out or (None if options.quick else RESULTS)
    results = {"run": setting(), "rows": run(options.quick)}
    write(results, report(results["rows"]), out, "gradient_checkpointing_attention")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
