"""From what was measured to the blocks that a plan is made for, and back to calls and layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_ext.recompute.leaves import Chosen
from lightning_ext.recompute.measure import Key, Measurement, Seen
from lightning_ext.recompute.ways import peak_of, ways_of
from strategies.checkpointing import Block, Partial, RecomputePlan, Span, plan_recompute
from strategies.checkpointing.budget import written
from strategies.checkpointing.recompute import runs

# Share of all activations from which on something is worth to be told.
_WORTH = 0.02


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


@dataclass(frozen=True)
class Table:
    """Blocks of a step.

    Args:
        keys: Of the calls.
        writes: Numbers of calls that write to their input.
        blocks: Of the calls, and of the code between them.
        calls: Number of the call that each block is; none for code.
        spans: Runs of blocks that can be run again.
        ways: Calls of layers that each block's ways do not keep the outputs of.
        weights: Bytes of attention weights that each call saves.
    """

    keys: tuple[Key, ...]
    writes: frozenset[int]
    blocks: tuple[Block, ...]
    calls: tuple[int | None, ...]
    spans: tuple[tuple[int, int], ...]
    ways: tuple[tuple[Chosen, ...], ...]
    weights: tuple[int, ...]

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
            f"{max(found)[1]}): softmax(QK^T)V by hand, or torch's attention with "
            "need_weights=True. F.scaled_dot_product_attention(q, k, v), or need_weights=False, "
            "keeps none of them, is faster, and equal up to rounding",
        )

    def plan(self, budget: float) -> RecomputePlan:
        """The cheapest plan within so many bytes."""
        return plan_recompute(self.blocks, budget, self.spans)

    def applied(self, plan: RecomputePlan) -> Applied:
        """A plan for blocks as one for calls."""
        layers = {self._call(block): self.ways[block][way] for block, way in _all_partial(plan)}
        spans = tuple(self._span(span) for span in plan.spans)
        return Applied(self.keys, spans, layers, self.writes)

    def _call(self, block: int) -> int:
        number = self.calls[block]
        assert number is not None
        return number

    def _span(self, span: Span) -> Span:
        inner = tuple(self._span(s) for s in span.inner)
        return Span(self._call(span.start), self._call(span.stop - 1) + 1, inner)


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
    rows: list[tuple[Block, int | None, tuple[Chosen, ...]]] = []
    for i, call in enumerate(calls):
        if between[i]:
            rows.append((Block("other code", between[i], 0, 0.0), None, ()))
        following = calls[i + 1] if i + 1 < len(calls) and calls[i + 1].linked else None
        kept = bool(following and following.seen and following.seen.first in following.seen.saved)
        rows.append(_block(call.key, call.seen, following is not None, kept, call.held, i))
    if between[-1]:
        rows.append((Block("other code", between[-1], 0, 0.0), None, ()))
    blocks, numbers, ways = zip(*rows, strict=True)
    return Table(
        tuple(call.key for call in calls), writes, blocks, numbers,
        tuple(_spans(numbers, chains, writes)), ways,
        tuple(call.seen.weights if call.seen else 0 for call in calls),
    )  # fmt: skip


def _block(
    key: Key, seen: Seen | None, linked: bool, kept: bool, held: bool, number: int
) -> tuple[Block, int, tuple[Chosen, ...]]:
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
        return Block(name, 0, 0, 0.0), number, ()
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
    return block, number, tuple(way.chosen for way in ways)


def _spans(
    numbers: Sequence[int | None], chains: Sequence[int], writes: frozenset[int]
) -> Iterator[tuple[int, int]]:
    """Runs of blocks in one chain; what writes to its input cannot begin one."""
    start = 0
    while start < len(numbers):
        number, stop = numbers[start], start + 1
        while stop < len(numbers) and _same_chain(number, numbers[stop], chains):
            stop += 1
        if number is not None:
            for first, last in runs(stop - start):
                if numbers[start + first] not in writes:
                    yield start + first, start + last
        start = stop


def _same_chain(first: int | None, other: int | None, chains: Sequence[int]) -> bool:
    return first is not None and other is not None and chains[first] == chains[other]


def _all_partial(plan: RecomputePlan) -> Iterator[tuple[int, int]]:
    yield from plan.partial
    pending = list(plan.spans)
    while pending:
        span = pending.pop()
        yield from span.partial
        pending += span.inner
