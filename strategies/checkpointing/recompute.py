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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

Steps = tuple[NDArray[np.int64], NDArray[np.float64]]  # memory ascending, cost descending
_MOST = 512  # steps kept of one function; beyond, memory is rounded up
_LONG = (
    32  # blocks; in longer chains the spans have lengths of a series, so that plans take seconds
)
_SERIES = tuple(sorted({n * 2**k for n in (2, 3) for k in range(30)} | {1}))


@dataclass(frozen=True)
class Block:
    """A part of a model, as measured.

    Args:
        name: For reports.
        saved: Bytes that its forward pass leaves for the backward pass, beyond its input; with its
            output, if that stays.
        output: Bytes of its output, which the next block needs to be run again.
        cost: Of its forward pass, in any unit: operations, seconds.
        transient: Bytes needed for a moment in its backward pass beyond what is saved. Default: 0.
        partial: Ways to save less inside the block, as pairs of bytes saved and cost of
            recomputation. Default: none.
    """

    name: str
    saved: int
    output: int
    cost: float
    transient: int = 0
    partial: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Span:
    """Blocks that are run again together, from the input of the first.

    Args:
        start: Index of the first block.
        stop: Index after the last.
        inner: Spans within, in order, that are recomputed once more while this one is run again.
        partial: Of single blocks that save less: index and number of the way.
    """

    start: int
    stop: int
    inner: tuple[Span, ...] = ()
    partial: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RecomputePlan:
    """What is recomputed.

    Args:
        spans: In order, without overlap; blocks in none of them are kept.
        partial: Of single kept blocks that save less: index and number of the way.
        peak: Bytes of activations at most, predicted.
        extra: Cost of what is run again, all in all.
        plain_peak: Bytes without recomputation.
        forward: Cost of one forward pass.
        budget: Bytes asked for.
    """

    spans: tuple[Span, ...]
    partial: tuple[tuple[int, int], ...]
    peak: int
    extra: float
    plain_peak: int
    forward: float
    budget: int

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget; if not, it is the least that is possible."""
        return self.peak <= self.budget


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
    solver = _Solver(blocks, _allowed(spans, len(blocks)))
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
        for value in (block.saved, block.output, block.cost, block.transient, *ways):
            _check_number(f"block {block.name!r}", value)
    _check_number("budget", budget)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {value!r} must be a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: {value!r} must be finite and not negative")


def _allowed(spans: Iterable[tuple[int, int]] | None, count: int) -> dict[int, tuple[int, ...]]:
    """Lengths of the spans that begin at each block."""
    if spans is None:
        lengths = range(1, count + 1) if count <= _LONG else _SERIES
        return {s: tuple(n for n in lengths if s + n <= count) for s in range(count)}
    found: dict[int, set[int]] = {}
    for start, stop in spans:
        if not 0 <= start < stop <= count:
            raise ValueError(
                f"spans: ({start}, {stop}) must be a non-empty run of the {count} blocks"
            )
        found.setdefault(start, set()).add(stop - start)
    return {start: tuple(sorted(lengths)) for start, lengths in found.items()}


@dataclass
class _Solver:
    """Least cost of each interval of blocks by memory.

    Args:
        blocks: In order.
        lengths: Of the spans that begin at each block.
    """

    blocks: Sequence[Block]
    lengths: Mapping[int, tuple[int, ...]]
    functions: dict[tuple[int, int], Steps] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = np.cumsum([0.0, *(b.cost for b in self.blocks)])
        kinds: dict[tuple[Any, ...], int] = {}
        self.kinds = [
            kinds.setdefault((b.saved, b.output, b.cost, b.transient, b.partial), len(kinds))
            for b in self.blocks
        ]
        self.same: dict[tuple[Any, ...], Steps] = {}

    def solve(self) -> Steps:
        last = len(self.blocks) - 1
        starts: dict[int, int] = {last: 0}
        for start, lengths in self.lengths.items():
            for length in lengths:
                stop = start + length - 1
                starts[stop] = min(start, starts.get(stop, start))
        for stop in sorted(starts):
            for start in range(stop, starts[stop] - 1, -1):
                self.functions[start, stop] = self._interval(start, stop)
        return self.functions[0, last]

    def _interval(self, s: int, t: int) -> Steps:
        key = tuple(
            (self.kinds[i], tuple(n for n in self.lengths.get(i, ()) if i + n - 1 <= t))
            for i in range(s, t + 1)
        )
        if key not in self.same:
            self.same[key] = _lowest([*self._choices(s, t)])
        return self.same[key]

    def _rest(self, s: int, t: int) -> Steps:
        if s > t:
            return np.zeros(1, np.int64), np.zeros(1)
        return self.functions[s, t]

    def _choices(self, s: int, t: int) -> Iterator[Steps]:
        block = self.blocks[s]
        work = block.saved + block.transient
        memory, cost = self._rest(s + 1, t)
        for saved, extra in ((block.saved, 0.0), *block.partial):
            yield _pruned(np.maximum(memory + saved, work), cost + extra)
        for length in self.lengths.get(s, ()):
            middle = s + length
            if middle <= t:  # the last blocks are needed at once: nothing is gained
                yield self._span(s, middle, t)

    def _span(self, s: int, middle: int, t: int) -> Steps:
        """Blocks from `s` until before `middle` leave nothing but the input of what follows."""
        right, left = self.functions[middle, t], self._inside(s, middle - 1)
        held = self.blocks[middle - 1].output
        cost = float(self.sums[middle] - self.sums[s])
        memory = np.union1d(right[0] + held, left[0])
        memory = memory[memory >= max(right[0][0] + held, left[0][0])]
        total = cost + _at(right, memory - held) + _at(left, memory)
        return _pruned(memory, total)

    def _inside(self, s: int, t: int) -> Steps:
        if s < t:
            return self.functions[s, t]
        block = self.blocks[s]
        return np.array([block.saved + block.transient], np.int64), np.zeros(1)

    def plan(
        self, s: int, t: int, memory: int
    ) -> tuple[tuple[Span, ...], tuple[tuple[int, int], ...]]:
        """The choices that make up the least cost of an interval."""
        spans: list[Span] = []
        partial: list[tuple[int, int]] = []
        while s <= t:
            best = min(self._ways(s, t, memory), key=lambda way: way[0])
            _, kind, number, memory_after = best
            if kind == "span":
                middle = s + number
                inner = self.plan(s, middle - 1, memory) if number > 1 else ((), ())
                spans.append(Span(s, middle, *inner))
                s = middle
            else:
                if number:
                    partial.append((s, number - 1))
                s += 1
            memory = memory_after
        return tuple(spans), tuple(partial)

    def _ways(self, s: int, t: int, memory: int) -> Iterator[tuple[float, str, int, int]]:
        block = self.blocks[s]
        work = block.saved + block.transient
        rest = self._rest(s + 1, t)
        for number, (saved, extra) in enumerate(((block.saved, 0.0), *block.partial)):
            if work <= memory and memory - saved >= rest[0][0]:
                left = memory - saved
                yield float(_at(rest, np.array([left]))[0]) + extra, "keep", number, left
        for length in self.lengths.get(s, ()):
            middle = s + length
            if middle > t:
                continue
            steps = self._span(s, middle, t)
            if steps[0][0] <= memory:
                left = memory - self.blocks[middle - 1].output
                yield float(_at(steps, np.array([memory]))[0]), "span", length, left


def _at(steps: Steps, memory: NDArray[np.int64]) -> NDArray[np.float64]:
    """Least cost with so much memory, which has to be enough."""
    return steps[1][np.searchsorted(steps[0], memory, side="right") - 1]


def _pruned(memory: NDArray[np.int64], cost: NDArray[np.float64]) -> Steps:
    """Of steps with ascending memory those that are cheaper than all before."""
    keep = np.ones(len(memory), bool)
    keep[:-1] &= memory[:-1] != memory[1:]
    memory, cost = memory[keep], cost[keep]
    lowest = np.minimum.accumulate(cost)
    better = np.ones(len(memory), bool)
    better[1:] = lowest[1:] < lowest[:-1]
    return memory[better], cost[better]


def _lowest(choices: Sequence[Steps]) -> Steps:
    """The lower envelope of several functions."""
    memory = np.concatenate([m for m, _ in choices])
    cost = np.concatenate([c for _, c in choices])
    order = np.lexsort((-cost, memory))
    memory, cost = _pruned(memory[order], cost[order])
    if len(memory) > _MOST:
        kept = np.unique(np.linspace(0, len(memory) - 1, _MOST).round().astype(int))
        memory, cost = memory[kept], cost[kept]
    return memory, cost
