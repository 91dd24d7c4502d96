"""What is wrong with the arguments of a strategy, whatever the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from strategies.parallel import SCHEDULES
from strategies.parallel.layout import check_whole


def check_arguments(
    pipeline: Any, tensor: Any, data: Any, microbatches: Any, schedule: str, **later: bool
) -> None:
    """Raise what `ThreeDParallelStrategy` raises when it is built.

    Args:
        pipeline: Stages.
        tensor: Ranks that share each tensor.
        data: Copies of the model, or `"auto"`.
        microbatches: Parts of a batch, or None.
        schedule: Its name.
        later: Switches that have a name, but do nothing yet.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size or the schedule cannot be.
    """
    check_whole("pipeline", pipeline, "pass the number of stages")
    check_whole("tensor", tensor, "pass the number of ranks that share each tensor")
    if data != "auto":
        check_whole("data", data, "pass the number of copies of the model, or 'auto'")
    if microbatches is not None:
        check_whole("microbatches", microbatches, "pass how many to cut a batch into, or None")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if schedule == "1f1b" and microbatches is not None and microbatches < pipeline:
        raise ValueError(
            f"microbatches={microbatches} are fewer than pipeline={pipeline} stages, which "
            f"schedule='1f1b' cannot run; pass at least {pipeline}, or schedule='gpipe'"
        )
    for name, value in later.items():
        if value:
            raise ValueError(f"{name}=True is not there yet; leave {name}=False")


def check_others(
    pipeline_module: Any, tensor_plan: Any, layers_per_stage: Any, backend: Any, timeout: Any
) -> None:
    """Raise what `ThreeDParallelStrategy` raises for its other arguments when it is built.

    Args:
        pipeline_module: Path of a module, or None.
        tensor_plan: Kind of split by pattern of names, or None.
        layers_per_stage: Numbers of parts, or None.
        backend: Of process groups, or None.
        timeout: Seconds.

    Raises:
        TypeError: One has the wrong type.
        ValueError: `timeout` is not a positive number of seconds.
    """
    for name, value in (("pipeline_module", pipeline_module), ("process_group_backend", backend)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name}={value!r}: pass a name, or None")
    plan = {} if tensor_plan is None else tensor_plan
    if not isinstance(plan, Mapping) or not all(isinstance(key, str) for key in plan):
        raise TypeError(
            f"tensor_plan={tensor_plan!r}: pass a dict from patterns of module names to "
            "'column', 'row', 'vocab' or 'replicate'"
        )
    counts = () if layers_per_stage is None else layers_per_stage
    listed = isinstance(counts, Sequence) and not isinstance(counts, str)
    if not listed or not all(isinstance(n, Integral) for n in counts):
        raise TypeError(f"layers_per_stage={layers_per_stage!r}: pass a number for each stage")
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout={timeout!r}: pass seconds")
    if not (math.isfinite(timeout) and float(timeout) > 0):
        raise ValueError(f"timeout={timeout!r}: pass seconds, more than 0")
