"""Parallel layouts: which rank, stage and tensor piece a part of the model goes to, and when."""

from strategies.parallel.layout import Coordinates, Layout
from strategies.parallel.schedule import SCHEDULES, Action, Timeline, timeline
from strategies.parallel.stages import partition
from strategies.parallel.tensor import ModuleInfo, TensorPlan, TensorRule, tensor_plan

__all__ = [
    "SCHEDULES",
    "Action",
    "Coordinates",
    "Layout",
    "ModuleInfo",
    "TensorPlan",
    "TensorRule",
    "Timeline",
    "partition",
    "tensor_plan",
    "timeline",
]
