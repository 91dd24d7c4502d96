"""Memory for time: which parts of a model are run again in the backward pass."""

from strategies.checkpointing.blocks import Block, Partial, RecomputePlan, Span
from strategies.checkpointing.recompute import plan_recompute

__all__ = ["Block", "Partial", "RecomputePlan", "Span", "plan_recompute"]
