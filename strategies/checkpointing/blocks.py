"""Blocks of a model, and plans of which of them are run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Partial(NamedTuple):
    """A way to save less inside a block: some of what it saves is made again from the rest.

    Args:
        saved: Bytes that are saved in this way.
        extra: Cost of what is made again.
        peak: Bytes at most while its backward pass runs.
    """

    saved: int
    extra: float
    peak: int


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
        partial: Ways to save less inside the block. Default: none.
        loose: Bytes of its output that are not in `saved`, as the next block does not save its
            input (an activation that saves its result); they stay only where the next block is
            run again. Default: 0.
        handed: Bytes of its output that are in `saved` for the next block alone: once that is
            through its backward pass and this one is run again, they are not needed. Default: 0.
    """

    name: str
    saved: int
    output: int
    cost: float
    transient: int = 0
    partial: tuple[Partial, ...] = ()
    loose: int = 0
    handed: int = 0


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
