"""Memory for time: which parts of a model are run again in the backward pass."""

from strategies.checkpointing.recompute import Block, RecomputePlan, Span, plan_recompute

__all__ = ["Block", "RecomputePlan", "Span", "plan_recompute"]
