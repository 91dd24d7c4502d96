"""From what was measured to the blocks that a plan is made for, and back to calls and layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_ext.recompute.leaves import Chosen
from lightning_ext.recompute.measure import Key, Measurement, Seen
from lightning_ext.recompute.ways import peak_of, ways_of
from strategies.checkpointing import Block, Partial, RecomputePlan, Span, plan_recompute
from strategies.checkpointing.budget import written
from strategies.checkpointing.recompute import runs

_MOST = 64  # blocks that are planned for, so that plans take seconds
# Share of all activations from which on something is worth to be told.
_WORTH = 0.02
# Share of the peak that a plan has to save to be worth its work though it is beyond the budget.
_LEAST = 0.05


@dataclass(frozen=True)
class Applied:
    """What a plan says about calls.

    Args:
        order: Of the calls.
        spans: Runs of them that are run again, by number.
        layers: Calls of layers whose outputs are not kept, for calls of blocks by number.
        writes: Calls that write to their input.
    """

    order: tuple[Key, ...]
    spans: tuple[Span, ...]
    layers: dict[int, Chosen]
    writes: frozenset[int]

    @property
    def nothing(self) -> bool:
        """Whether nothing is run again."""
        return not self.spans and not any(self.layers.values())


@dataclass(frozen=True)
class Table:
    """Blocks of a step.

    Args:
        keys: Of the calls.
        writes: Numbers of calls that write to their input.
        blocks: Of the calls, and of the code between them.
        calls: Numbers of the calls that each block is; none for code.
        spans: Runs of blocks that can be run again.
        ways: Calls of layers that each block's ways do not keep the outputs of, by call.
        weights: Bytes of attention weights that each call saves.
        other: Cost of what is outside of blocks. Default: None, it is not known.
    """

    keys: tuple[Key, ...]
    writes: frozenset[int]
    blocks: tuple[Block, ...]
    calls: tuple[range | None, ...]
    spans: tuple[tuple[int, int], ...]
    ways: tuple[tuple[dict[int, Chosen], ...], ...]
    weights: tuple[int, ...]
    other: float | None = None

    @property
    def forward(self) -> float | None:
        """Cost of a forward pass, in blocks and outside of them; none if that is not known."""
        return None if self.other is None else self.other + sum(b.cost for b in self.blocks)

    @property
    def plain_peak(self) -> int:
        """Bytes of activations in the plain run."""
        return sum(block.saved for block in self.blocks)

    @property
    def advice(self) -> tuple[str, ...]:
        """What would save memory without being run again."""
        found = [(n, key[0]) for n, key in zip(self.weights, self.keys, strict=True) if n]
        total = sum(n for n, _ in found)
        if not found or total < _WORTH * self.plain_peak:
            return ()
        return (
            f"attention weights take {written(total)} in {len(found)} blocks (such as "
            f"{max(found)[1]}): softmax(QK^T)V by hand, torch's attention with need_weights=True, "
            "or F.scaled_dot_product_attention where only its math kernel will do, as for dropout "
            "of weights on a CPU. Its other kernels, or need_weights=False, keep none of them, are "
            "faster, and equal up to rounding",
        )

    def plan(self, budget: float) -> RecomputePlan:
        """The cheapest plan within so many bytes; none of it where it falls short for nothing."""
        plan = plan_recompute(self.blocks, budget, self.spans)
        if plan.fits or plan.plain_peak - plan.peak >= _LEAST * plan.plain_peak:
            return plan
        return replace(plan, spans=(), partial=(), peak=plan.plain_peak, extra=0.0)

    def applied(self, plan: RecomputePlan) -> Applied:
        """A plan for blocks as one for calls."""
        layers: dict[int, Chosen] = {}
        for block, way in _all_partial(plan):
            layers |= self.ways[block][way]
        spans = tuple(self._span(span) for span in plan.spans)
        return Applied(self.keys, spans, layers, self.writes)

    def _calls(self, block: int) -> range:
        numbers = self.calls[block]
        assert numbers is not None
        return numbers

    def _span(self, span: Span) -> Span:
        inner = tuple(self._span(s) for s in span.inner)
        return Span(self._calls(span.start).start, self._calls(span.stop - 1).stop, inner)


def table(measured: Measurement, writes: frozenset[int]) -> Table:
    """The blocks of a measured step.

    Args:
        measured: Where the backward pass is over.
        writes: Numbers of calls that write to their input.
    """
    calls = measured.calls
    chains = [0] * len(calls)  # first call of the chain that each belongs to
    for i, call in enumerate(calls):
        chains[i] = chains[i - 1] if call.linked and i else i
    between = [0] * (len(calls) + 1)
    for position, size in measured.outside:
        # Before the chain: within it, nothing that stays may come between.
        between[chains[position] if position < len(calls) else position] += size
    rows: list[_Row] = []
    for i, call in enumerate(calls):
        if between[i]:
            rows.append(_Row(Block("other code", between[i], 0, 0.0), None, ()))
        following = calls[i + 1] if i + 1 < len(calls) and calls[i + 1].linked else None
        kept = bool(following and following.seen and following.seen.first in following.seen.saved)
        rows.append(_block(call.key, call.seen, following is not None, kept, call.held, i))
    if between[-1]:
        rows.append(_Row(Block("other code", between[-1], 0, 0.0), None, ()))
    rows = _grouped(rows, chains)
    numbers = [row.calls for row in rows]
    return Table(
        tuple(call.key for call in calls), writes, tuple(row.block for row in rows),
        tuple(numbers), tuple(_spans(numbers, chains, writes)), tuple(row.ways for row in rows),
        tuple(call.seen.weights if call.seen else 0 for call in calls), measured.other,
    )  # fmt: skip


class _Row(NamedTuple):
    """A block.

    Args:
        block: It.
        calls: Their numbers; none for code.
        ways: As in `Table`.
    """

    block: Block
    calls: range | None
    ways: tuple[dict[int, Chosen], ...]


def _grouped(rows: Sequence[_Row], chains: Sequence[int]) -> list[_Row]:
    """Neighbours of one chain as one block, so that there are few enough to plan for."""
    most = math.ceil(len(rows) / _MOST)
    found: list[list[_Row]] = []
    for row in rows:
        last = found[-1] if found else []
        if last and len(last) < most and _same_chain(last[-1].calls, row.calls, chains):
            last.append(row)
        else:
            found.append([row])
    return [group[0] if len(group) == 1 else _joined(group) for group in found]


def _joined(rows: Sequence[_Row]) -> _Row:
    """Blocks as one: all of it is kept, run again, or saves less in the first way of each."""
    blocks, last = [row.block for row in rows], rows[-1].block
    first, final = rows[0].calls, rows[-1].calls
    assert first is not None
    assert final is not None
    saved = sum(block.saved for block in blocks)
    partial: tuple[Partial, ...] = ()
    ways: tuple[dict[int, Chosen], ...] = ()
    less = [(row.block.saved, row.block.partial[0], row.ways[0]) for row in rows if row.ways]
    if less:
        kept = saved - sum(all_ - way.saved for all_, way, _ in less)
        peak = kept + max(way.peak - way.saved for _, way, _ in less)
        partial = (Partial(kept, sum(way.extra for _, way, _ in less), peak),)
        ways = ({number: layers for _, _, way in less for number, layers in way.items()},)
    cost = sum(block.cost for block in blocks)
    name = f"{blocks[0].name} to {last.name}"
    joined = Block(name, saved, last.output, cost, 0, partial, last.loose, last.handed)
    return _Row(joined, range(first.start, final.stop), ways)


def _block(key: Key, seen: Seen | None, linked: bool, kept: bool, held: bool, number: int) -> _Row:
    """A call as a block.

    Args:
        key: Of the call.
        seen: When it was run again.
        linked: Whether the next call takes its output.
        kept: Whether that call saves it.
        held: Whether it stays in any case.
        number: Of the call.
    """
    name = key[0] if not key[1] else f"{key[0]} (call {key[1] + 1})"
    if seen is None:  # nothing of it was asked for in the backward pass
        return _Row(Block(name, 0, 0, 0.0), range(number, number + 1), ())
    address, size = seen.output
    own = {a: n for a, n in seen.saved.items() if a not in seen.inputs}
    if held:
        own.pop(address, None)
    handed = size if kept and not held and address not in own else 0
    if handed:
        own[address] = size
    droppable = {a: n for a, n in own.items() if a != address}
    ways = [way for way in ways_of(seen, droppable) if way.gain]
    saved = sum(own.values())
    partial = tuple(Partial(saved - way.gain, way.cost, peak_of(seen, own, way)) for way in ways)
    output = size if linked and not held else 0
    loose = 0 if address in own else output
    block = Block(name, saved, output, seen.cost, 0, partial, loose, handed)
    return _Row(block, range(number, number + 1), tuple({number: way.chosen} for way in ways))


def _spans(
    numbers: Sequence[range | None], chains: Sequence[int], writes: frozenset[int]
) -> Iterator[tuple[int, int]]:
    """Runs of blocks in one chain; what writes to its input cannot begin one."""
    start = 0
    while start < len(numbers):
        number, stop = numbers[start], start + 1
        while stop < len(numbers) and _same_chain(number, numbers[stop], chains):
            stop += 1
        if number is not None:
            for first, last in runs(stop - start):
                begins = numbers[start + first]
                if begins is not None and begins.start not in writes:
                    yield start + first, start + last
        start = stop


def _same_chain(first: range | None, other: range | None, chains: Sequence[int]) -> bool:
    return first is not None and other is not None and chains[first[0]] == chains[other[0]]


def _all_partial(plan: RecomputePlan) -> Iterator[tuple[int, int]]:
    yield from plan.partial
    pending = list(plan.spans)
    while pending:
        span = pending.pop()
        yield from span.partial
        pending += span.inner
