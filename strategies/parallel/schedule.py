"""When each stage of a pipeline works on which microbatch, and how long it stands idle.

Source: Huang et al., GPipe (arXiv 1811.06965), section 2.3; Narayanan et al. 2021
(arXiv 2104.04473), section 2.2, for 1F1B with a flush (PipeDream-Flush).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real

from strategies.parallel.layout import check_whole

_Order = Iterator[tuple[str, int]]


@dataclass(frozen=True)
class Action:
    """One piece of work of a stage.

    Args:
        kind: `"forward"` or `"backward"`.
        microbatch: Which one, from 0.
        start: When it begins, in the unit of the durations.
        end: When it is done.
    """

    kind: str
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One training step of a pipeline.

    Args:
        actions: What each stage does, in order.

    Example:
        >>> step = timeline("1f1b", stages=2, microbatches=3)
        >>> step.duration, step.bubble_fraction, step.peak_in_flight
        (12.0, 0.25, (2, 1))
        >>> print(step.render(width=22))
        stage 0 |01..aa2bb.cc|
        stage 1 |.0aa1bb2cc..|
    """

    actions: tuple[tuple[Action, ...], ...]

    @property
    def duration(self) -> float:
        """When the last stage is done, in the unit of the durations."""
        return max(action.end for stage in self.actions for action in stage)

    @property
    def bubble_fraction(self) -> float:
        """Share of the time of all stages in which they stand idle, from 0 to 1."""
        whole = len(self.actions) * self.duration
        busy = math.fsum(action.end - action.start for stage in self.actions for action in stage)
        return max(0.0, 1 - busy / whole) if whole else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Most microbatches whose activations a stage keeps at once: forward, not yet backward."""
        peaks = []
        for stage in self.actions:
            kept = peak = 0
            for action in stage:
                kept += 1 if action.kind == "forward" else -1
                peak = max(peak, kept)
            peaks.append(peak)
        return tuple(peaks)

    def render(self, width: int = 80) -> str:
        """A picture in text, one row per stage.

        Digits are forwards, letters backwards, with `a` for microbatch 0 and again for 10; dots
        are idle.

        Args:
            width: Columns, from 20. Default: 80.

        Raises:
            TypeError: `width` is not a whole number.
            ValueError: `width` is below 20.
        """
        check_whole("width", width, "pass the columns of the terminal, such as 80", least=20)
        labels = [
            f"stage {i:>{len(str(len(self.actions) - 1))}} |" for i in range(len(self.actions))
        ]
        room = width - len(labels[0]) - 1
        units = math.ceil(self.duration)
        # A whole number of columns per unit of time, if there is room, keeps equal work equal.
        columns = room // units * units if 0 < units <= room else room
        return "\n".join(
            f"{label}{self._row(stage, columns)}|"
            for label, stage in zip(labels, self.actions, strict=True)
        )

    def _row(self, stage: Sequence[Action], columns: int) -> str:
        row = ["."] * columns
        scale = columns / self.duration if self.duration else 0.0
        for action in stage:
            symbols = "0123456789" if action.kind == "forward" else "abcdefghij"
            for column in range(round(action.start * scale), round(action.end * scale)):
                row[column] = symbols[action.microbatch % 10]
        return "".join(row)


def timeline(
    schedule: str,
    stages: int,
    microbatches: int,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
) -> Timeline:
    """Simulate one training step of a pipeline; sending takes no time.

    Use it to choose the number of microbatches and the schedule before any device is rented:
    more microbatches, less idle time; 1F1B keeps fewer activations than GPipe.

    Args:
        schedule: `"gpipe"` or `"1f1b"`.
        stages: Number of stages.
        microbatches: Number of microbatches that a batch is cut into.
        forward: Duration of the forward of one microbatch, for all stages or for each.
            Default: 1.0.
        backward: Duration of the backward, likewise. Default: 2.0.

    Returns:
        What each stage does and when.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The schedule is unknown, a number is out of range, or 1F1B is given fewer
            microbatches than stages.

    Example:
        >>> timeline("gpipe", stages=4, microbatches=8).bubble_fraction == 3 / 11
        True
    """
    check_whole("stages", stages, "pass 1 for a single stage")
    orders = [order(schedule, stage, stages, microbatches) for stage in range(stages)]
    given = {"forward": forward, "backward": backward}
    times = {kind: _per_stage(kind, value, stages) for kind, value in given.items()}
    actions: list[list[Action]] = [[] for _ in orders]
    # The input of the first stage is there from the start.
    ends = {("forward", microbatch, -1): 0.0 for microbatch in range(microbatches)}
    while any(len(done) < len(todo) for done, todo in zip(actions, orders, strict=True)):
        for stage, (done, todo) in enumerate(zip(actions, orders, strict=True)):
            for kind, microbatch in todo[len(done) :]:
                ready = ends.get(_needed(kind, microbatch, stage, stages))
                if ready is None:
                    break
                start = max(ready, done[-1].end if done else 0.0)
                end = ends[kind, microbatch, stage] = start + times[kind][stage]
                done.append(Action(kind, microbatch, start, end))
    return Timeline(tuple(tuple(stage) for stage in actions))


def order(schedule: str, stage: int, stages: int, microbatches: int) -> tuple[tuple[str, int], ...]:
    """What one stage does, one after the other, as torch's schedule of that name does.

    Args:
        schedule: `"gpipe"` or `"1f1b"`.
        stage: Which stage, from 0.
        stages: Number of stages.
        microbatches: Number of microbatches that a batch is cut into.

    Returns:
        Pairs of `"forward"` or `"backward"` and the microbatch.

    Raises:
        TypeError: A number is not a whole number.
        ValueError: The schedule is unknown, a number is out of range, or 1F1B is given fewer
            microbatches than stages.

    Example:
        >>> order("1f1b", stage=1, stages=2, microbatches=2)
        (('forward', 0), ('backward', 0), ('forward', 1), ('backward', 1))
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} must be one of {', '.join(map(repr, SCHEDULES))}")
    check_whole("stages", stages, "pass 1 for a single stage")
    check_whole("stage", stage, "the first is 0", least=0, most=stages - 1)
    check_whole("microbatches", microbatches, "pass 1 not to cut the batch")
    return tuple(_ORDERS[schedule](stage, stages, microbatches))


def _gpipe(stage: int, stages: int, microbatches: int) -> _Order:
    yield from (("forward", i) for i in range(microbatches))
    yield from (("backward", i) for i in range(microbatches))


def _one_forward_one_backward(stage: int, stages: int, microbatches: int) -> _Order:
    if microbatches < stages:  # torch refuses it as well
        raise ValueError(
            f"microbatches={microbatches} is fewer than stages={stages}, which 1f1b cannot fill; "
            f"pass microbatches={stages} or more, or schedule='gpipe'"
        )
    warm_up = stages - stage
    yield from (("forward", i) for i in range(warm_up))
    for i in range(microbatches):
        yield "backward", i
        if warm_up + i < microbatches:
            yield "forward", warm_up + i


# A further schedule is one function here and its name.
_ORDERS: dict[str, Callable[[int, int, int], _Order]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
}
SCHEDULES = tuple(_ORDERS)


def _needed(kind: str, microbatch: int, stage: int, stages: int) -> tuple[str, int, int]:
    """What must be done before an action, on a neighbour or, at the end, on the stage itself."""
    if kind == "forward":
        return "forward", microbatch, stage - 1
    last = stage == stages - 1
    return ("forward", microbatch, stage) if last else ("backward", microbatch, stage + 1)


def _per_stage(name: str, value: float | Sequence[float], stages: int) -> tuple[float, ...]:
    numbers = tuple(value) if isinstance(value, Sequence) else (value,) * stages
    if len(numbers) != stages:
        raise ValueError(
            f"{name}={value!r} has {len(numbers)} durations for {stages} stages; pass one per "
            "stage, or a single number for all"
        )
    for number in numbers:
        given: object = number
        if isinstance(given, bool) or not isinstance(given, Real):
            raise TypeError(f"{name}={value!r} must be a duration, or a list with one per stage")
        if not math.isfinite(number) or number < 0:
            raise ValueError(f"{name}={value!r} must be finite and >= 0, in any unit of time")
    return tuple(float(number) for number in numbers)
