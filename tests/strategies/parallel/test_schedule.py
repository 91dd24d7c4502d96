"""Schedules, against closed forms, against torch's own runs and under random durations."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from strategies.parallel import SCHEDULES, Timeline, timeline
from strategies.parallel.schedule import order

GRID = [(p, m) for p in range(1, 9) for m in range(p, 17)]


class RecordingStage:
    """What torch's schedules ask of a stage; it notes what they do, and sends nothing."""

    device = "cpu"
    has_backward = True

    def __init__(self, stage: int, stages: int) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.done: list[tuple[str, int]] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.done.append(("forward", microbatch))

    def backward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.done.append(("backward", microbatch))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []


def as_torch_runs(schedule: str, stage: int, stages: int, microbatches: int) -> Any:
    recording: Any = RecordingStage(stage, stages)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    runner = kind(recording, microbatches)
    chunks: Any = [()] * microbatches
    runner._step_microbatches(chunks, [{}] * microbatches)
    return tuple(recording.done)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 1), (1, 3), (2, 2), (2, 5), (4, 4), (4, 8)]
)
def test_order_is_that_of_torch(schedule: str, stages: int, microbatches: int) -> None:
    for stage in range(stages):
        expected = as_torch_runs(schedule, stage, stages, microbatches)
        assert order(schedule, stage, stages, microbatches) == expected


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"),
        (1, "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"),
        (2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"),
        (3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"),
    ],
)
def test_order_as_drawn_in_the_paper(stage: int, expected: str) -> None:
    """Figure 4 of arXiv 2104.04473: four stages, eight microbatches."""
    found = order("1f1b", stage, stages=4, microbatches=8)
    assert " ".join(f"{kind[0].upper()}{i}" for kind, i in found) == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_bubble_in_closed_form(schedule: str, stages: int, microbatches: int) -> None:
    step = timeline(schedule, stages, microbatches)
    expected = (stages - 1) / (microbatches + stages - 1)
    assert step.bubble_fraction == pytest.approx(expected, abs=1e-12)
    assert step.duration == 3 * (microbatches + stages - 1)
    longer = timeline(schedule, stages, microbatches, forward=0.3, backward=0.7)
    assert longer.bubble_fraction == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_activations_kept(stages: int, microbatches: int) -> None:
    assert timeline("gpipe", stages, microbatches).peak_in_flight == (microbatches,) * stages
    assert timeline("1f1b", stages, microbatches).peak_in_flight == tuple(
        min(microbatches, stages - stage) for stage in range(stages)
    )


@pytest.mark.parametrize("stages", range(1, 9))
def test_gpipe_with_fewer_microbatches_than_stages(stages: int) -> None:
    for microbatches in range(1, stages + 1):
        step = timeline("gpipe", stages, microbatches)
        assert step.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1))


def check(step: Timeline, forward: list[float], backward: list[float]) -> None:
    """Every action has its inputs, and none waits for anything but these and the one before."""
    ends = {
        (stage, action.kind, action.microbatch): action.end
        for stage, actions in enumerate(step.actions)
        for action in actions
    }
    last = len(step.actions) - 1
    for stage, actions in enumerate(step.actions):
        free = 0.0
        for action in actions:
            if action.kind == "forward":
                inputs = ends[stage - 1, "forward", action.microbatch] if stage else 0.0
                taken = forward[stage]
            else:
                inputs = ends[stage, "forward", action.microbatch]
                if stage < last:
                    inputs = max(inputs, ends[stage + 1, "backward", action.microbatch])
                taken = backward[stage]
            assert action.start == max(free, inputs)
            assert action.end == action.start + taken
            free = action.end


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(30))
def test_unequal_stages(schedule: str, seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 6)
    microbatches = draw.randint(stages, 12)
    forward = [draw.choice([0.0, 0.5, 1.0, draw.random()]) for _ in range(stages)]
    backward = [draw.choice([0.0, 1.0, 2.0, draw.random()]) for _ in range(stages)]
    step = timeline(schedule, stages, microbatches, forward, backward)
    check(step, forward, backward)
    for stage, actions in enumerate(step.actions):
        done = tuple((action.kind, action.microbatch) for action in actions)
        assert done == order(schedule, stage, stages, microbatches)
    slowest = max(f + b for f, b in zip(forward, backward, strict=True))
    assert step.duration >= microbatches * slowest - 1e-9
    assert 0 <= step.bubble_fraction <= 1


def test_one_number_is_the_same_for_every_stage() -> None:
    assert timeline("1f1b", 3, 4, 2, 3) == timeline("1f1b", 3, 4, [2, 2, 2], (3, 3, 3))


def test_slowest_stage_sets_the_pace() -> None:
    step = timeline("1f1b", 2, 10, forward=[1, 4], backward=[2, 8])
    assert step.duration == 1 + 10 * 12 + 2


def test_no_time_at_all() -> None:
    step = timeline("gpipe", 2, 2, forward=0, backward=0)
    assert (step.duration, step.bubble_fraction) == (0, 0)
    assert step.render(20) == "stage 0 |..........|\nstage 1 |..........|"


def test_picture() -> None:
    assert timeline("gpipe", 3, 2).render(34) == (
        "stage 0 |0011............aaaabbbb|\n"
        "stage 1 |..0011......aaaabbbb....|\n"
        "stage 2 |....0011aaaabbbb........|"
    )


@pytest.mark.parametrize("width", [20, 21, 40, 80, 200])
@pytest.mark.parametrize("stages", [1, 2, 9, 12])
def test_picture_keeps_to_its_width(width: int, stages: int) -> None:
    for scale in (0.001, 0.7, 1.0, 1000.0):
        step = timeline("1f1b", stages, 16, forward=scale, backward=2.1 * scale)
        rows = step.render(width).splitlines()
        assert len(rows) == stages
        assert len({len(row) for row in rows}) == 1
        assert len(rows[0]) <= width


def test_picture_counts_microbatches_to_ten() -> None:
    row = timeline("gpipe", 1, 12).render(200).split("|")[1]
    assert list(dict.fromkeys(row)) == list("0123456789abcdefghij")
    unit = len(row) // 36
    assert row[10 * unit : 12 * unit] == "0" * unit + "1" * unit


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"schedule": "zb"}, ValueError, "schedule='zb' must be one of 'gpipe', '1f1b'"),
        ({"schedule": None}, ValueError, "schedule=None"),
        ({"schedule": ["1f1b"]}, ValueError, "schedule="),
        ({"stages": 0}, ValueError, "stages=0"),
        ({"stages": True}, TypeError, "stages=True"),
        ({"microbatches": 0}, ValueError, "microbatches=0"),
        ({"microbatches": 4.0}, TypeError, r"microbatches=4\.0"),
        ({"microbatches": 3}, ValueError, "pass microbatches=4 or more, or schedule='gpipe'"),
        ({"forward": -1}, ValueError, "forward=-1 must be finite and >= 0"),
        ({"forward": math.nan}, ValueError, "forward=nan"),
        ({"backward": math.inf}, ValueError, "backward=inf"),
        ({"backward": [1, 2]}, ValueError, r"backward=\[1, 2\] has 2 durations for 4 stages"),
        ({"forward": "fast"}, TypeError, "forward='fast' must be a duration"),
        ({"forward": True}, TypeError, "forward=True"),
        ({"forward": None}, TypeError, "forward=None"),
        ({"forward": [1, 2, 3, "4"]}, TypeError, "forward="),
    ],
)
def test_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    usual: dict[str, Any] = {"schedule": "1f1b", "stages": 4, "microbatches": 8}
    with pytest.raises(error, match=message):
        timeline(**(usual | change))


@pytest.mark.parametrize("stage", [-1, 4])
def test_stages_that_are_not_there(stage: int) -> None:
    with pytest.raises(ValueError, match=f"stage={stage} must be a whole number from 0 to 3"):
        order("1f1b", stage, stages=4, microbatches=8)


def test_torch_refuses_what_we_refuse() -> None:
    for stages, microbatches in itertools.product(range(1, 5), repeat=2):
        refused = False
        try:
            as_torch_runs("1f1b", 0, stages, microbatches)
        except ValueError:
            refused = True
        assert refused == (microbatches < stages)
        if refused:
            with pytest.raises(ValueError, match=f"microbatches={microbatches} is fewer than"):
                order("1f1b", 0, stages, microbatches)


@pytest.mark.parametrize("width", [19, 0, -80])
def test_too_narrow(width: int) -> None:
    with pytest.raises(ValueError, match=f"width={width} must be a whole number >= 20"):
        timeline("gpipe", 2, 2).render(width)
