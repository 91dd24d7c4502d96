"""How a model is divided into stages and pieces: everything about it that can be wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_ext import _compat
from lightning_ext.parallel import describe
from lightning_ext.parallel.parts import Pipeline, PipelinePart, find_pipeline
from strategies.parallel import TensorPlan, partition, tensor_plan
from strategies.parallel.stages import bounds, checked_counts

Division = tuple[Pipeline | None, list[list[PipelinePart]], TensorPlan]


def divide(
    module: nn.Module,
    stages: int,
    pieces: int,
    name: str | None = None,
    layers: Sequence[int] | None = None,
    patterns: Mapping[str, str] | None = None,
) -> Division:
    """The pipelined module, the parts of each stage, and what is split over the tensor axis.

    Args:
        module: The LightningModule, whole.
        stages: Number of stages.
        pieces: Ranks that share each tensor.
        name: Of the pipelined module.
        layers: Parts in each stage; None balances them.
        patterns: Kinds of layers, by path.

    Raises:
        ValueError: The model cannot be divided so.
    """
    if not getattr(module, "automatic_optimization", True):
        raise ValueError(
            "ThreeDParallelStrategy cannot run manual optimization, where training_step calls "
            "backward itself; use automatic optimization"
        )
    if any(p.is_complex() for p in module.parameters()):
        raise ValueError(
            "ThreeDParallelStrategy cannot train complex parameters; keep real and imaginary parts "
            "in a real one, with torch.view_as_complex() in forward"
        )
    pipeline: Pipeline | None = None
    held: list[list[PipelinePart]] = [[]]
    if stages > 1:
        pipeline = find_pipeline(module, name, stages)
        if len(pipeline.parts) < stages:
            raise ValueError(
                f"pipeline={stages} is more than the {len(pipeline.parts)} parts of "
                f"{pipeline.name!r}; pass at most that"
            )
        if layers is None:
            counts = partition(describe.costs(pipeline.parts), stages)
        else:
            counts = checked_counts(layers, stages, pipeline.names)
        held = [list(pipeline.parts[b:e]) for b, e in bounds(counts)]
    roots = describe.roots_of(module, pipeline.parts) if pipeline else [""]
    plan = tensor_plan(describe.module_infos(module), pieces, patterns, roots)
    if pieces > 1:
        why = "nn.MultiheadAttention is not split, each rank computes all of it"
        plan.left |= dict.fromkeys(describe.closed_attention(module), why)
    return pipeline, held, plan


def one_by_one(optimizers: Sequence[Any]) -> None:
    """Optimizers cannot take split and whole tensors in one call."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name in ("foreach", "fused"):
                if group.get(name):
                    group[name] = False
                    _compat.rank_zero_info(
                        f"ThreeDParallelStrategy: {type(optimizer).__name__} runs with "
                        f"{name}=False, as it cannot take split and whole tensors together"
                    )


def check_undivided(module: nn.Module) -> None:
    """Refuse a module that another strategy has cut: its ranks no longer hold the same names.

    Raises:
        ValueError: Some of its tensors are on other ranks.
    """
    held = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta or isinstance(tensor, DTensor) for tensor in held):
        raise ValueError(
            "this module is already divided by another ThreeDParallelStrategy; pass that strategy "
            "to the Trainer again, or a new module and ckpt_path="
        )
