"""What is wrong with the arguments of a strategy, whatever the model."""

from __future__ import annotations

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
