"""What is planned for batches of one kind, and how it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ext._compat import rank_zero_warn
from lightning_ext.recompute.advice import compiled_whole
from lightning_ext.recompute.blocks import Applied, Table
from lightning_ext.recompute.microbatched import Microbatched
from lightning_ext.recompute.runner import Runner
from strategies.checkpointing import MemoryReport, RecomputePlan
from strategies.checkpointing.budget import written
from strategies.checkpointing.shapes import Shapes, elements, in_words, somewhat_larger

_KINDS = 16  # of batches, after which others follow the nearest
_NEAR = 1.1  # how much larger than what was measured


@dataclass
class Planned:
    """What is done with batches of one kind.

    Args:
        table: Blocks of a step, as measured.
        applied: What is run again.
        report: For people.
        tries: How often it was corrected, or measured anew.
    """

    table: Table | Microbatched
    applied: Applied
    report: MemoryReport
    tries: int = 0


def plan_for(plans: Mapping[Shapes, Planned], shapes: Shapes) -> Planned | None:
    """The plan of somewhat larger batches; of the nearest ones where too many kinds are known.

    Args:
        plans: By shapes.
        shapes: Of a batch that has no plan of its own.
    """
    for known, planned in plans.items():
        if somewhat_larger(known, shapes):
            return planned
    if len(plans) < _KINDS:
        return None
    least = elements(shapes) / _NEAR
    enough = [known for known in plans if elements(known) >= least]
    return plans[min(enough, key=elements)] if enough else None


def report_of(
    runner: Runner, table: Table | Microbatched, plan: RecomputePlan, shapes: str
) -> MemoryReport:
    """What was measured and planned, with advice.

    Args:
        runner: Has measured.
        table: What it has measured.
        plan: For it.
        shapes: Of the batch.
    """
    left = (f"{name} is not run again: {why}" for name, why in runner.excluded.items())
    whole = compiled_whole(runner.units, table.blocks)
    advice = (*table.advice, *whole, *runner.checkpoints.advice, *left)
    return MemoryReport(shapes, table.blocks, plan, None, advice, table.forward)


def tell(text: str) -> None:
    """Warn on rank zero.

    Args:
        text: What of.
    """
    rank_zero_warn(f"DynamicGradientCheckpointing: {text}")


def explain(kind: tuple[int, Shapes] | None, planned: Planned | None) -> None:
    """Say why a batch does not fit.

    Args:
        kind: Of the batch.
        planned: The plan with which it does not fit; none if it was measured.
    """
    shapes = in_words(kind[1]) if kind else "unknown"
    if planned is None:
        reason = "every block was run again, as in each first step with a batch of new shapes"
    else:
        least = written(planned.report.plan.peak)
        reason = (
            f"its activations need {least} at least, which was planned; largest blocks: "
            f"{planned.report.largest()}"
        )
    tell(
        f"a batch of {shapes} does not fit: {reason}. A smaller batch or a shorter sequence, "
        "smaller blocks (blocks=), a lower precision or an optimizer with less state need less"
    )
