"""The recursion over intervals of blocks, for all bounds on memory at once.

What an interval costs is a step function of the memory that it is given: exact up to 512 steps; of
more, some are left out, which rounds memory up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.checkpointing.blocks import Block, Partial, Span

Steps = tuple[NDArray[np.int64], NDArray[np.float64]]  # memory ascending, cost descending
_MOST = 512  # steps kept of one function; beyond, memory is rounded up


@dataclass(frozen=True)
class _Interval:
    """Least cost of an interval of blocks by memory.

    Args:
        best: Whatever comes first.
        kept: If the first block is kept.
        again: If the first blocks are run again; none if they cannot be.
    """

    best: Steps
    kept: Steps
    again: Steps | None


@dataclass(frozen=True)
class _Way:
    """What can be done with the first blocks of an interval.

    Args:
        cost: Least, of the whole interval.
        length: Of the span; 0 if the first block is kept.
        partial: Number of the way in which the kept block saves less, from 1; 0 if all is kept.
        left: Memory for what follows.
        then: What comes first there: `"kept"` or `"again"`; none if that is free.
    """

    cost: float
    length: int
    partial: int
    left: int
    then: str | None


@dataclass
class Solver:
    """Least cost of each interval of blocks by memory.

    Args:
        blocks: In order.
        lengths: Of the spans that begin at each block.
    """

    blocks: Sequence[Block]
    lengths: Mapping[int, tuple[int, ...]]
    intervals: dict[tuple[int, int], _Interval] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = np.cumsum([0.0, *(b.cost for b in self.blocks)])
        kinds: dict[tuple[Any, ...], int] = {}
        self.kinds = [
            kinds.setdefault(
                (b.saved, b.output, b.cost, b.transient, b.partial, b.loose, b.handed),
                len(kinds),
            )
            for b in self.blocks
        ]
        self.same: dict[int, _Interval] = {}
        # Intervals that are alike have one number; of the one that begins a block later, and so on.
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.alike: dict[tuple[int, int], int] = {}

    def solve(self) -> Steps:
        """Least cost of all blocks by memory."""
        last = len(self.blocks) - 1
        starts: dict[int, int] = {last: 0}
        for start, lengths in self.lengths.items():
            for length in lengths:
                stop = start + length - 1
                starts[stop] = min(start, starts.get(stop, start))
        for stop in sorted(starts):
            for start in range(stop, starts[stop] - 1, -1):
                self.intervals[start, stop] = self._interval(start, stop)
        return self.intervals[0, last].best

    def _interval(self, s: int, t: int) -> _Interval:
        lengths = tuple(n for n in self.lengths.get(s, ()) if s + n - 1 <= t)
        first = self.kinds[s], lengths, self.alike.get((s + 1, t), -1)
        key = self.alike[s, t] = self.numbers.setdefault(first, len(self.numbers))
        if key not in self.same:
            kept = _lowest([*self._keeping(s, t)])
            spans = [self._span(s, s + length, t) for length in self._spans(s, t)]
            again = _lowest(spans) if spans else None
            best = kept if again is None else _lowest([kept, again])
            self.same[key] = _Interval(best, kept, again)
        return self.same[key]

    def _spans(self, s: int, t: int) -> Iterator[int]:
        """Lengths of spans; the last blocks are needed at once, nothing is gained there."""
        return (length for length in self.lengths.get(s, ()) if s + length <= t)

    def _after(self, i: int, t: int, held: int) -> Iterator[tuple[Steps, int, str | None]]:
        """Ways on from block `i`, each with the bytes that stay of what is before it.

        Args:
            i: The last block before.
            t: The last block of the interval.
            held: Bytes that stay if the next block is kept.
        """
        loose = self.blocks[i].loose
        if i == t:
            yield (np.zeros(1, np.int64), np.zeros(1)), held, None
        elif not loose:
            yield self.intervals[i + 1, t].best, held, None
        else:
            following = self.intervals[i + 1, t]
            yield following.kept, held, "kept"
            if following.again is not None:
                yield following.again, held + loose, "again"

    def _keeping(self, s: int, t: int) -> Iterator[Steps]:
        for way in self._partial(s, t):
            for (memory, cost), held, _ in self._after(s, t, way.saved):
                yield _pruned(np.maximum(memory + held, way.peak), cost + way.extra)

    def _partial(self, i: int, t: int) -> Iterator[Partial]:
        """What block `i` may save, all of it first, in an interval that ends with block `t`."""
        block = self.blocks[i]
        for way in (Partial(block.saved, 0.0, block.saved + block.transient), *block.partial):
            less = block.handed if i == t else 0
            yield Partial(max(way.saved - less, 0), way.extra, max(way.peak - less, 0))

    def _span(self, s: int, middle: int, t: int) -> Steps:
        """Blocks from `s` until before `middle` leave nothing but the input of what follows."""
        block, left = self.blocks[middle - 1], self.intervals[s, middle - 1].best
        right = _lowest([
            (memory + held, cost)
            for (memory, cost), held, _ in self._after(middle - 1, t, block.output - block.loose)
        ])  # fmt: skip
        memory = np.union1d(right[0], left[0])
        memory = memory[memory >= max(right[0][0], left[0][0])]
        total = float(self.sums[middle] - self.sums[s]) + at(right, memory) + at(left, memory)
        return _pruned(memory, total)

    def plan(
        self, s: int, t: int, memory: int
    ) -> tuple[tuple[Span, ...], tuple[tuple[int, int], ...]]:
        """The choices that make up the least cost of an interval."""
        spans: list[Span] = []
        partial: list[tuple[int, int]] = []
        then: str | None = None
        while s <= t:
            ways = [*(() if then == "again" else self._kept_ways(s, t, memory))]
            ways += () if then == "kept" else self._span_ways(s, t, memory)
            best = min(ways, key=lambda way: way.cost)
            if best.partial:
                partial.append((s, best.partial - 1))
            if best.length:
                middle = s + best.length
                spans.append(Span(s, middle, *self.plan(s, middle - 1, memory)))
            s, memory, then = s + max(best.length, 1), best.left, best.then
        return tuple(spans), tuple(partial)

    def _kept_ways(self, s: int, t: int, memory: int) -> Iterator[_Way]:
        for number, way in enumerate(self._partial(s, t)):
            for steps, held, then in self._after(s, t, way.saved):
                if way.peak <= memory and memory - held >= steps[0][0]:
                    cost = float(at(steps, np.array([memory - held]))[0]) + way.extra
                    yield _Way(cost, 0, number, memory - held, then)

    def _span_ways(self, s: int, t: int, memory: int) -> Iterator[_Way]:
        for length in self._spans(s, t):
            middle = s + length
            block, left = self.blocks[middle - 1], self.intervals[s, middle - 1].best
            again = float(self.sums[middle] - self.sums[s])
            for steps, held, then in self._after(middle - 1, t, block.output - block.loose):
                if memory >= left[0][0] and memory - held >= steps[0][0]:
                    cost = again + float(at(left, np.array([memory]))[0])
                    cost += float(at(steps, np.array([memory - held]))[0])
                    yield _Way(cost, length, 0, memory - held, then)


def at(steps: Steps, memory: NDArray[np.int64]) -> NDArray[np.float64]:
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
