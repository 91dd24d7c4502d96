"""Plans for a stage of a pipeline, which keeps the activations of several microbatches at once."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from typing import Any

from lightning_ext.recompute.blocks import Applied, Table, table
from lightning_ext.recompute.measure import Measurement
from strategies.checkpointing import Block, RecomputePlan, Span
from strategies.checkpointing.report import timeline
from strategies.parallel import timeline as schedule_of

_ROUNDS = 4


@dataclass(frozen=True)
class Microbatched:
    """Blocks of one microbatch, of which several are on their way.

    Args:
        one: Blocks of one microbatch.
        count: Microbatches of a step.
        in_flight: How many of them are there at once.
    """

    one: Table
    count: int
    in_flight: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Of one microbatch."""
        return self.one.blocks

    @property
    def forward(self) -> float | None:
        """Cost of the forward pass of one microbatch; none if it is not known."""
        return self.one.forward

    @property
    def advice(self) -> tuple[str, ...]:
        """What would save memory without being run again."""
        return self.one.advice

    @property
    def plain_peak(self) -> int:
        """Bytes of activations in the plain run, of all that are there at once."""
        return self.in_flight * self.one.plain_peak

    def plan(self, budget: float) -> RecomputePlan:
        """A plan for each microbatch that keeps all that are there at once within so many bytes.

        All but one wait with what they hold after their forward pass; one is in its backward pass.
        """
        waiting = self.in_flight - 1
        best = self.one.plan(budget / self.in_flight)
        for _ in range(_ROUNDS):
            held = self._held(best)
            more = self.one.plan(max(budget - waiting * held, 0))
            if more.extra >= best.extra or more.peak + waiting * self._held(more) > budget:
                break
            best = more
        return replace(
            best,
            peak=best.peak + waiting * self._held(best),
            plain_peak=self.plain_peak,
            budget=int(budget),
        )

    def applied(self, plan: RecomputePlan) -> Applied:
        """The plan for the calls of all microbatches."""
        one = self.one.applied(plan)
        size = len(one.order)
        return Applied(
            tuple((name, k) for k in range(self.count) for name, _ in one.order),
            tuple(_moved(span, k * size) for k in range(self.count) for span in one.spans),
            {n + k * size: chosen for k in range(self.count) for n, chosen in one.layers.items()},
            frozenset(n + k * size for k in range(self.count) for n in one.writes),
        )

    def _held(self, plan: RecomputePlan) -> int:
        # The last thing before the first backward pass is the end of the forward pass.
        steps = timeline(self.one.blocks, plan)
        first = next(i for i, (what, _) in enumerate(steps) if what.endswith(" backward"))
        return steps[first - 1][1]


def _moved(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by, tuple(_moved(s, by) for s in span.inner))


def microbatched(
    measured: Measurement, writes: frozenset[int], strategy: Any
) -> Microbatched | None:
    """The blocks of one microbatch, where a step is run as several in a pipeline.

    Args:
        measured: Where the backward pass is over.
        writes: Numbers of calls that write to their input.
        strategy: Of the trainer.
    """
    loaded = sys.modules.get("lightning_ext.strategies")
    if loaded is None or not isinstance(strategy, loaded.ThreeDParallelStrategy):
        return None
    size = len({call.key[0] for call in measured.calls})
    passes = [measured.calls[i : i + size] for i in range(0, len(measured.calls), size)]
    names = [[call.key[0] for call in one] for one in passes]
    if strategy.pipeline == 1 or any(other != names[0] for other in names):
        return None
    # Before a first step the strategy runs a stage once to learn shapes, without a backward pass.
    seen = [i for i, one in enumerate(passes) if any(call.seen for call in one)]
    begin, count = seen[0] * size, len(seen)
    first = copy.copy(measured)
    first.calls = passes[seen[0]]
    first.other = None if measured.other is None else measured.other / len(passes)
    first.outside = [(at - begin, n) for at, n in measured.outside if 0 <= at - begin <= size]
    order = schedule_of(strategy.schedule, strategy.pipeline, count)
    in_flight = order.peak_in_flight[strategy.mesh.stage]
    return Microbatched(table(first, frozenset(n for n in writes if n < size)), count, in_flight)
