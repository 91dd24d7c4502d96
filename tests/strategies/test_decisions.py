"""The decision log: ordered, read-only, and saved as plain values."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import json
import pickle

import numpy as np
import pytest

from strategies import Decision, DecisionLog


@pytest.fixture
def log() -> DecisionLog:
    ticks = itertools.count(100.0)
    log = DecisionLog("EarlyStop", clock=lambda: next(ticks))
    log.record(0, "start", "first batch seen")
    log.record(10, "wait", "loss still falls", loss=0.5, patience=3)
    log.record(20, "stop", "loss flat", loss=0.25)
    return log


def test_what_was_recorded_in_the_order_in_which_it_was(log: DecisionLog) -> None:
    assert list(log) == [
        Decision(100.0, 0, "EarlyStop", "start", "first batch seen", {}),
        Decision(101.0, 10, "EarlyStop", "wait", "loss still falls", {"loss": 0.5, "patience": 3}),
        Decision(102.0, 20, "EarlyStop", "stop", "loss flat", {"loss": 0.25}),
    ]


def test_record_returns_the_decision_it_appends(log: DecisionLog) -> None:
    decision = log.record(30, "resume", "asked to", rate=1e-3)
    assert log[-1] is decision


def test_order_is_that_of_recording_whatever_the_step(log: DecisionLog) -> None:
    log.record(5, "rewind", "rolled back")
    assert [d.step for d in log] == [0, 10, 20, 5]


def test_is_a_sequence(log: DecisionLog) -> None:
    assert len(log) == 3
    assert log[0].action == "start"
    assert log[-1].action == "stop"
    assert [d.step for d in log[1:]] == [10, 20]
    assert [d.step for d in log[::-1]] == [20, 10, 0]
    assert [d.step for d in reversed(log)] == [20, 10, 0]
    assert log.index(log[1]) == 1
    with pytest.raises(IndexError):
        log[3]


def test_is_read_only(log: DecisionLog) -> None:
    with pytest.raises(TypeError):
        log[0] = log[1]  # type: ignore[index]
    with pytest.raises(TypeError):
        del log[0]  # type: ignore[attr-defined]
    log[:].clear()
    assert len(log) == 3


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Decision)])
def test_decisions_are_frozen(log: DecisionLog, name: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(log[0], name, None)


def test_numbers_do_not_follow_the_callers_objects() -> None:
    log = DecisionLog("Rates")
    numbers = {"rate": 0.1}
    log.record(1, "set", "why", **numbers)
    numbers["rate"] = 9.0
    assert log[0].numbers == {"rate": 0.1}


def plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return type(value) in (str, int, float)


def test_state_is_plain_whatever_numbers_came_in() -> None:
    log = DecisionLog("Rates", clock=lambda: np.float64(1.5))
    log.record(np.int64(7), "set", "why", rate=np.float32(0.5), levels=np.int64(3), count=2)
    state = log.state_dict()
    assert plain(state), state
    assert state == [
        {
            "time": 1.5,
            "step": 7,
            "callback": "Rates",
            "action": "set",
            "reason": "why",
            "numbers": {"rate": 0.5, "levels": 3.0, "count": 2.0},
        }
    ]


def test_round_trip_through_json(log: DecisionLog) -> None:
    restored = DecisionLog("EarlyStop")
    restored.load_state_dict(json.loads(json.dumps(log.state_dict())))
    assert list(restored) == list(log)
    assert restored.state_dict() == log.state_dict()


def test_round_trip_through_a_torch_checkpoint_without_pickled_code(log: DecisionLog) -> None:
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save({"callbacks": {"EarlyStop": log.state_dict()}}, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)["callbacks"]["EarlyStop"]
    restored = DecisionLog("EarlyStop")
    restored.load_state_dict(state)
    assert list(restored) == list(log)


def test_state_and_log_share_nothing(log: DecisionLog) -> None:
    before = list(log)
    state = log.state_dict()
    state[1]["numbers"]["loss"] = -1.0
    state.pop()
    assert list(log) == before
    assert log[1].numbers["loss"] == 0.5

    restored = DecisionLog("EarlyStop")
    state = log.state_dict()
    restored.load_state_dict(state)
    state[1]["numbers"]["loss"] = -1.0
    assert restored[1].numbers["loss"] == 0.5


def test_loading_replaces_and_recording_goes_on(log: DecisionLog) -> None:
    other = DecisionLog("EarlyStop")
    other.record(99, "old", "to be forgotten")
    other.load_state_dict(log.state_dict())
    other.record(30, "next", "goes on")
    assert [d.action for d in other] == ["start", "wait", "stop", "next"]
    assert len(log) == 3


def test_clear(log: DecisionLog) -> None:
    log.clear()
    assert list(log) == []
    assert log.record(1, "again", "afresh") is log[0]


def test_copies_are_independent() -> None:
    log = DecisionLog("EarlyStop")
    log.record(1, "start", "why", loss=0.5)
    for twin in (copy.deepcopy(log), pickle.loads(pickle.dumps(log))):
        assert list(twin) == list(log)
        twin.record(2, "more", "only here")
        assert len(log) == 1


def test_time_comes_from_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    before = time.time()
    decision = DecisionLog("EarlyStop").record(0, "start", "why")
    assert before <= decision.time <= time.time()


def test_repr(log: DecisionLog) -> None:
    assert repr(log) == "DecisionLog('EarlyStop', 3 decisions)"


def test_numbers_must_be_numbers(log: DecisionLog) -> None:
    with pytest.raises(ValueError, match="not a number"):
        log.record(1, "set", "why", rate="not a number")  # type: ignore[arg-type]
    assert len(log) == 3
