"""What holds the memory of a training step, and what a plan makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strategies.checkpointing.blocks import Block, RecomputePlan, Span
from strategies.checkpointing.budget import written
from strategies.report import table


@dataclass(frozen=True)
class MemoryReport:
    """Memory and work of a training step, plain and as planned.

    All sizes are bytes of activations: what the forward pass leaves for the backward pass, and
    what is there again of it. Parameters, their gradients, optimizer state and the batch are not
    counted.

    Args:
        batch: Shapes of the batch, as text.
        blocks: Of the model, in the order in which they run.
        plan: What is run again.
        measured: Bytes at most in the first step with the plan. Default: None, not measured yet.
        advice: What would save memory without being run again, and what else is to be known.
            Default: none.
        forward: Cost of one forward pass, in blocks and outside of them. Default: None, only that
            of blocks is known, of which all shares of work are then told.
    """

    batch: str
    blocks: tuple[Block, ...]
    plan: RecomputePlan
    measured: int | None = None
    advice: tuple[str, ...] = ()
    forward: float | None = None

    @property
    def saved(self) -> int:
        """Bytes by which the plan lowers the peak, as predicted."""
        return self.plan.plain_peak - self.plan.peak

    @property
    def extra(self) -> float:
        """What is run again as a share of a plain step, whose backward pass is two forwards."""
        return self.plan.extra / (3 * self._forward) if self._forward else 0.0

    @property
    def _forward(self) -> float:
        return self.plan.forward if self.forward is None else self.forward

    @property
    def treatment(self) -> tuple[str, ...]:
        """What becomes of each block."""
        again = [0] * len(self.blocks)
        for span in _all(self.plan.spans):
            for number in range(span.start, span.stop):
                again[number] += 1
        found = [f"run again {n}x" if n else "kept" for n in again]
        inside = (pair for span in _all(self.plan.spans) for pair in span.partial)
        for number, way in (*self.plan.partial, *inside):
            found[number] += f", holding {written(self.blocks[number].partial[way].saved)}"
        return tuple(found)

    def largest(self, most: int = 3) -> str:
        """The blocks that hold most in a plain step, as text.

        Args:
            most: Blocks to name. Default: 3.
        """
        found = sorted(self.blocks, key=lambda block: -block.saved)[:most]
        return ", ".join(f"{block.name} ({written(block.saved)})" for block in found)

    def shortfall(self, memory_budget: Any) -> str | None:
        """What the budget lacks, as text; none where the plan is within it.

        Args:
            memory_budget: As the user gave it.
        """
        if self.plan.fits:
            return None
        least = (
            f"the least that its activations can be brought to is {written(self.plan.peak)}, "
            "which is done"
            if self.plan.extra
            else f"its activations stay at {written(self.plan.peak)}, as to run blocks again would "
            "save next to nothing"
        )
        return (
            f"memory_budget={memory_budget!r} is {written(self.plan.budget)} for a batch of "
            f"{self.batch}; {least}. Largest blocks: {self.largest()}. Smaller blocks (blocks=), a "
            "smaller batch or a shorter sequence need less"
        )

    def explain(self, most: int = 10) -> str:
        """Which blocks hold the most memory in a plain step, and what was done with them.

        Args:
            most: Blocks to show. Default: 10.
        """
        order = sorted(range(len(self.blocks)), key=lambda i: -self.blocks[i].saved)[:most]
        total = max(self.plan.plain_peak, 1)
        rows = [
            (
                self.blocks[i].name,
                written(self.blocks[i].saved),
                f"{self.blocks[i].saved / total:.1%}",
                f"{self.blocks[i].cost / max(self._forward, 1):.1%}",
                self.treatment[i],
            )
            for i in order
        ]
        work = "of the work" if self.forward is not None else "of blocks' work"
        more = [f"... and {len(self.blocks) - most} more"] if len(self.blocks) > most else []
        shown = table(("block", "saves", "of all", work, "plan"), rows)
        return "\n".join([str(self), shown, *more, *self.advice])

    def plot(self, ax: Any = None) -> Any:
        """Draw memory over one step, plain and as planned; needs matplotlib.

        Args:
            ax: Axes of matplotlib to draw on. Default: None, new ones.

        Returns:
            The axes.
        """
        from strategies.checkpointing.plot import plot_memory

        return plot_memory(self, ax)

    def __str__(self) -> str:
        peak = f"{written(self.plan.peak)} predicted with this plan"
        if self.measured is not None:
            peak += f", {written(self.measured)} measured"
        work = "a step's" if self.forward is not None else "its blocks'"
        return (
            f"batch {self.batch}: activations {written(self.plan.plain_peak)} in the plain run, "
            f"{peak}; {self.extra:.1%} of {work} operations run again"
        )


def timeline(blocks: Sequence[Block], plan: RecomputePlan | None = None) -> list[tuple[str, int]]:
    """Bytes of activations after each thing that happens in a step.

    Args:
        blocks: In the order in which they run.
        plan: What is run again. Default: None, nothing.

    Returns:
        Pairs of what happened and bytes.

    Example:
        >>> timeline([Block("a", 10, 2, 1.0), Block("b", 20, 2, 1.0)])
        [('a', 10), ('b', 30), ('b backward', 30), ('a backward', 10), ('end', 0)]
    """
    spans, partial = (plan.spans, plan.partial) if plan else ((), ())
    return [*_walked(blocks, spans, dict(partial), 0, len(blocks) - 1, 0), ("end", 0)]


def _walked(
    blocks: Sequence[Block],
    spans: Iterable[Span],
    partial: dict[int, int],
    first: int,
    last: int,
    held: int,
) -> Iterator[tuple[str, int]]:
    starts = {span.start: span for span in spans}
    stack: list[tuple[int | Span, int]] = []
    i = first
    while i <= last:
        item: int | Span = starts.get(i, i)
        end = item.stop if isinstance(item, Span) else i + 1
        block = blocks[end - 1]
        if isinstance(item, Span):
            left = block.output - block.loose
        else:
            left = block.partial[partial[i]].saved if i in partial else block.saved
            left -= block.handed if i == last else 0
        left += block.loose if end in starts else 0
        stack.append((item, left))
        held += left
        yield block.name, held
        i = end
    for item, left in reversed(stack):
        held -= left
        if isinstance(item, Span):
            inner = dict(item.partial)
            yield from _walked(blocks, item.inner, inner, item.start, item.stop - 1, held)
        else:
            block = blocks[item]
            work = block.saved + block.transient
            if item in partial:
                work = block.partial[partial[item]].peak
            work -= block.handed if item == last else 0
            yield f"{block.name} backward", held + work


def _all(spans: Iterable[Span]) -> Iterator[Span]:
    for span in spans:
        yield span
        yield from _all(span.inner)
