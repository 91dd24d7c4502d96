"""Which blocks of a model to run again in the backward pass, so that activations fit in memory.

The forward pass leaves what the backward pass needs. A run of blocks that is recomputed leaves only
its input; when the backward pass comes to it, it is run again, and may then itself consist of runs
that are recomputed. The plan of least cost under a bound on memory follows from one recursion over
intervals of blocks, as in Rotor, which is solved here for all bounds at once: what an interval
costs is a step function of the memory that it is given. It is exact up to 512 steps; of more, some
are left out, which rounds memory up.

Source: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous
chains: how to train deep neural networks with limited memory" (arXiv 1911.13214), theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import numpy as np

from strategies.checkpointing.blocks import Block, RecomputePlan
from strategies.checkpointing.solver import Solver

# In longer chains the spans have lengths of a series, so that plans take seconds.
_LONG = 32
_SERIES = tuple(sorted({n * 2**k for n in (2, 3) for k in range(30)} | {1}))


def plan_recompute(
    blocks: Sequence[Block],
    budget: float,
    spans: Iterable[tuple[int, int]] | None = None,
) -> RecomputePlan:
    """The cheapest recomputation that keeps activations within a number of bytes.

    Optimal (see above) among plans whose recomputed spans are those allowed, nested or apart:
    for a chain of blocks, any run of them. Blocks that do not form a chain (branches, blocks with
    code in between) are listed in the order in which they run, with the spans that can be run by
    themselves; nested modules are spans of the blocks inside them.

    Args:
        blocks: In the order in which they run.
        budget: Bytes for activations.
        spans: Pairs (start, stop) of blocks that can be run again together. Default: None, any run
            of blocks; with more than 32 blocks any run of 1, 2, 3, 4, 6, 8, 12, ... of them.

    Returns:
        The plan. If no plan fits, the one with the lowest peak, and `fits` is false.

    Raises:
        TypeError: A size or a cost is not a number.
        ValueError: There are no blocks, a size or a cost is negative or not finite, or a span is
            empty or outside the blocks.

    Source: arXiv 1911.13214, theorem 1, with step functions in place of slots of memory.

    Example:
        >>> blocks = [Block(f"layer{i}", saved=10, output=2, cost=1.0) for i in range(4)]
        >>> plan = plan_recompute(blocks, budget=20)
        >>> plan.plain_peak, plan.peak, plan.extra
        (40, 16, 3.0)
        >>> [(span.start, span.stop) for span in plan.spans]
        [(0, 1), (1, 2), (2, 3)]
    """
    _check(blocks, budget)
    solver = Solver(blocks, _allowed(spans, len(blocks)))
    memory, cost = solver.solve()
    fitting = int(np.searchsorted(memory, math.floor(budget), side="right"))
    chosen = max(fitting - 1, 0)
    found, partial = solver.plan(0, len(blocks) - 1, int(memory[chosen]))
    return RecomputePlan(
        found, partial, int(memory[chosen]), float(cost[chosen]),
        int(_plain_peak(blocks)), float(sum(b.cost for b in blocks)), math.floor(budget),
    )  # fmt: skip


def _plain_peak(blocks: Sequence[Block]) -> int:
    kept, peak = 0, 0
    for block in blocks:
        kept += block.saved
        peak = max(peak, kept + block.transient)
    return peak


def _check(blocks: Sequence[Block], budget: float) -> None:
    if not blocks:
        raise ValueError("blocks is empty; pass at least one Block")
    for block in blocks:
        ways = [value for way in block.partial for value in way]
        sizes = block.saved, block.output, block.transient, block.loose, block.handed
        for value in (*sizes, block.cost, *ways):
            _check_number(f"block {block.name!r}", value)
        if block.loose + block.handed > block.output:
            raise ValueError(
                f"block {block.name!r}: loose={block.loose!r} and handed={block.handed!r} must be "
                f"parts of output={block.output!r}"
            )
    _check_number("budget", budget)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {value!r} must be a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: {value!r} must be finite and not negative")


def runs(count: int) -> Iterator[tuple[int, int]]:
    """Runs of blocks of a chain that plans are made of: all, or in long chains those of a series.

    Args:
        count: Of the blocks.
    """
    lengths = range(1, count + 1) if count <= _LONG else _SERIES
    for start in range(count):
        yield from ((start, start + n) for n in lengths if start + n <= count)


def _allowed(spans: Iterable[tuple[int, int]] | None, count: int) -> dict[int, tuple[int, ...]]:
    """Lengths of the spans that begin at each block."""
    found: dict[int, set[int]] = {}
    for start, stop in runs(count) if spans is None else spans:
        if not 0 <= start < stop <= count:
            raise ValueError(
                f"spans: ({start}, {stop}) must be a non-empty run of the {count} blocks"
            )
        found.setdefault(start, set()).add(stop - start)
    return {start: tuple(sorted(lengths)) for start, lengths in found.items()}
