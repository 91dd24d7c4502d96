"""From calls of blocks, as measured, to the blocks that a plan is made for."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strategies.checkpointing import Block, RecomputePlan, Span, plan_recompute
from strategies.checkpointing.report import timeline
from strategies.checkpointing.shapes import Shapes


def size_of(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array.

    Args:
        shape: Its dimensions.
        dtype: Its type, or the name of it.

    Example:
        >>> size_of((2, 3), "float32"), size_of((8,), "bool")
        (24, 8)
    """
    bits = re.search(r"\d+", str(dtype))
    return math.prod(shape) * max(int(bits[0]) // 8, 1) if bits else math.prod(shape)


@dataclass
class Call:
    """A call of a block in the forward pass, as it was measured.

    Args:
        name: Of the block.
        saved: Bytes that it saves for the backward pass, without its inputs and its output.
        output: Bytes of its output.
        cost: Of the forward pass, in operations.
        linked: Whether its first argument is the output of the call before.
        saves_input: Whether it saves its first argument.
        saves_output: Whether it saves its output.
        held: Whether code outside of blocks holds its output in any case, which is counted there.
        before: Bytes that code outside of blocks has saved since the call before.
    """

    name: str
    saved: int = 0
    output: int = 0
    cost: float = 0.0
    linked: bool = False
    saves_input: bool = True
    saves_output: bool = False
    held: bool = False
    before: int = 0


@dataclass(frozen=True)
class Table:
    """Calls of blocks in a step.

    Args:
        blocks: Calls in order, and the code between them.
        names: Of the block that is called in each; none for code.
        shapes: Of the batch.
        advice: What people should know of how it was measured. Default: nothing.
        forward: Cost of the forward pass with code outside of blocks. Default: None, not known.
    """

    blocks: tuple[Block, ...]
    names: tuple[str | None, ...]
    shapes: Shapes
    advice: tuple[str, ...] = ()
    forward: float | None = None

    @property
    def plain_peak(self) -> int:
        """Bytes of activations in the plain run."""
        return sum(block.saved for block in self.blocks)

    @property
    def holds_nothing(self) -> bool:
        """Whether no block saves anything that could be made again."""
        named = zip(self.blocks, self.names, strict=True)
        return all(block.saved <= block.output for block, name in named if name is not None)

    def plan(self, budget: float) -> RecomputePlan:
        """The cheapest plan within so many bytes, each block being run again by itself."""
        spans = [(i, i + 1) for i, name in enumerate(self.names) if name is not None]
        plan = plan_recompute(self.blocks, budget, spans)
        chosen = self.chosen(plan)
        # A block that is called several times is run again after all calls or after none.
        found = tuple(Span(i, i + 1) for i, name in enumerate(self.names) if name in chosen)
        if len(found) == len(plan.spans):
            return plan
        plan = replace(plan, spans=found, extra=sum(self.blocks[s.start].cost for s in found))
        return replace(plan, peak=max(size for _, size in timeline(self.blocks, plan)))

    def chosen(self, plan: RecomputePlan) -> frozenset[str]:
        """Names of the blocks that a plan runs again."""
        names = (self.names[span.start] for span in plan.spans)
        return frozenset(name for name in names if name is not None)


@dataclass
class Measured:
    """One step, as measured.

    Args:
        calls: Of blocks, in order.
        after: Bytes that code after the last block has saved.
        shapes: Of the batch.
        advice: What people should know of how it was measured. Default: nothing.
        forward: Cost of the forward pass with code outside of blocks. Default: None, not known.
    """

    calls: Sequence[Call]
    after: int
    shapes: Shapes
    advice: tuple[str, ...] = ()
    forward: float | None = None

    def without(self, names: Collection[str]) -> Measured | None:
        """The step with some blocks as code that is run once, or none if no block is left.

        Args:
            names: Of these blocks.
        """
        calls: list[Call] = []
        outside, cut = 0, False  # bytes that belong to code now, and whether it comes next
        for call in self.calls:
            if call.name not in names:
                linked = call.linked and not cut
                calls.append(replace(call, before=call.before + outside, linked=linked))
                outside, cut = 0, False
                continue
            if call.linked and calls and not cut:
                calls[-1].held = True
                outside += calls[-1].output
            outside += call.before + call.saved + call.output
            cut = True
        return replace(self, calls=calls, after=self.after + outside) if calls else None

    def table(self) -> Table:
        """The calls of the step as blocks that can be planned for."""
        rows: list[tuple[Block, str | None]] = []
        for call, following in zip(self.calls, [*self.calls[1:], None], strict=True):
            if call.before:
                rows.append((Block("other code", call.before, 0, 0.0), None))
            rows.append((_block(call, following), call.name))
        if self.after:
            rows.append((Block("other code", self.after, 0, 0.0), None))
        blocks, names = zip(*rows, strict=True)
        return Table(blocks, names, self.shapes, self.advice, self.forward)


def _block(call: Call, following: Call | None) -> Block:
    """A call as a block: its output stays with it if the next call takes it and nobody else."""
    output, handed = 0, False
    if following is not None and following.linked and not call.held:
        output, handed = call.output, following.saves_input and not call.saves_output
    own = call.saved + (call.output if call.saves_output and not call.held else 0)
    saved = own + (output if handed else 0)
    loose = 0 if handed or call.saves_output else output
    return Block(call.name, saved, output, call.cost, 0, (), loose, output if handed else 0)
