"""Memory for time: which parts of a model are run again in the backward pass."""

from strategies.checkpointing.blocks import Block, Partial, RecomputePlan, Span
from strategies.checkpointing.recompute import plan_recompute
from strategies.checkpointing.report import MemoryReport

__all__ = ["Block", "MemoryReport", "Partial", "RecomputePlan", "Span", "plan_recompute"]
