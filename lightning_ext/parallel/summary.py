"""What is where, before training starts: a table of the stages, the plan, the expected bubble."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_ext import _compat
from lightning_ext.parallel import describe
from lightning_ext.parallel.parts import Pipeline, PipelinePart, parameters_of
from strategies.parallel import Layout, TensorPlan, timeline
from strategies.report import table

_COLUMNS = (
    "stage", "parts", "parameters per rank", "bytes", "of gradients", "of optimizer state (Adam)",
)  # fmt: skip


def summary(
    root: nn.Module,
    layout: Layout,
    pipeline: Pipeline | None,
    stages: Sequence[Sequence[PipelinePart]],
    plan: TensorPlan,
    schedule: str,
    microbatches: int | None,
    plain: bool = False,
) -> str:
    """Stages with their parts and parameters, what is split, and the expected bubble.

    Args:
        root: The LightningModule, whole.
        layout: Sizes of the axes.
        pipeline: What is cut into stages, if anything.
        stages: Parts of each.
        plan: For the tensor axis.
        schedule: Name of the schedule.
        microbatches: How many; None for four per stage.
        plain: Draw the table without rich. Default: False.
    """
    rows = _stage_rows(root, layout, pipeline, stages, plan)
    lines = [f"{layout.in_words} ({layout.world_size} ranks)", table(_COLUMNS, rows, plain)]
    if layout.tensor > 1:
        lines += _tensor_lines(plan)
    if pipeline is not None:
        count = microbatches or 4 * layout.pipeline
        costs = [sum(describe.costs(parts)) or 1.0 for parts in stages]
        expected = timeline(schedule, layout.pipeline, count, costs, [2 * c for c in costs])
        lines.append(
            f"  {schedule}, {count} microbatches: idle {100 * expected.bubble_fraction:.0f}% of "
            f"the time; at most {max(expected.peak_in_flight)} in flight"
        )
    return "\n".join(lines)


def warn_of_whole(plan: TensorPlan, size: int) -> None:
    """Say what the tensor axis does not make smaller."""
    if size > 1 and not plan.rules:
        _compat.rank_zero_warn(
            f"tensor={size} splits nothing of this model, so that its ranks do the same work; "
            f"name layers with tensor_plan=, or pass tensor=1{_because(plan)}"
        )
    elif size > 1 and plan.left:
        _compat.rank_zero_warn(f"tensor={size}: each rank holds all of{_because(plan)}")


def _because(plan: TensorPlan) -> str:
    return "".join(f"\n  {path}: {why}" for path, why in plan.left.items())


def _stage_rows(
    root: nn.Module,
    layout: Layout,
    pipeline: Pipeline | None,
    stages: Sequence[Sequence[PipelinePart]],
    plan: TensorPlan,
) -> list[list[str]]:
    names = {id(p): name for name, p in root.named_parameters()}
    cut = {f"{path}.weight" for path in plan.rules}
    cut |= {f"{path}.bias" for path, rule in plan.rules.items() if rule.dim == 0}
    inside = {id(p) for parts in stages for part in parts for p in parameters_of(part)}
    outside = {id(p): p for p in root.parameters() if id(p) not in inside}
    rows, first = [], 0
    for index, parts in enumerate(stages):
        own = outside | {id(p): p for part in parts for p in parameters_of(part)}
        share = {i: p.numel() // (layout.tensor if names[i] in cut else 1) for i, p in own.items()}
        size = sum(share[i] * p.element_size() for i, p in own.items())
        held = _shortened(pipeline.names[first : first + len(parts)]) if pipeline else "all"
        first += len(parts)
        count = f"{sum(share.values()):,}"
        rows.append([str(index), held, count, _bytes(size), _bytes(size), _bytes(2 * size)])
    return rows


def _tensor_lines(plan: TensorPlan) -> list[str]:
    lines = []
    for kind in ("column", "row", "vocab"):
        paths = [path for path, rule in plan.rules.items() if rule.kind == kind]
        if paths:
            lines.append(f"  split by {kind}: {_shortened(paths)}")
    lines += [f"  whole: {path}: {why}" for path, why in plan.left.items()]
    return [*lines, "  everything else is whole on each rank"]


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
