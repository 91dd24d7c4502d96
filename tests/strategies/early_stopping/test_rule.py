"""The rule: what stops it, what holds it, and that replaying is the same as living through it."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.early_stopping import PredictiveStopping, forecast, stopping_epoch
from tests.strategies.early_stopping.curves import curves, falling, overfitting


def lived(
    values: np.ndarray, budget: int | None = None, train: np.ndarray | None = None, **options: Any
) -> int | None:
    """Evaluations made when the rule is asked after each of them."""
    rule = PredictiveStopping("min", **options)
    losses = np.full(len(values), np.nan) if train is None else train
    for done, (value, loss) in enumerate(zip(values, losses, strict=True), start=1):
        if rule.update(value, loss, budget).stop:
            return done
    return None


@settings(max_examples=25)
@given(curves(shortest=5), st.sampled_from(["safe", "fast"]), st.booleans())
def test_replay_is_the_same_as_living_through_it(
    values: np.ndarray, preset: str, known: bool
) -> None:
    budget = len(values) if known else None
    assert stopping_epoch(values, "min", budget, preset) == lived(values, budget, preset=preset)


def test_replay_with_train_loss_is_the_same_too() -> None:
    values, train = overfitting(60, turn=15), falling(60)
    stop = stopping_epoch(values, "min", 60, train_values=train)
    assert stop == lived(values, 60, train)


def test_overfitting_is_stopped_and_bolder_presets_stop_no_later() -> None:
    values = overfitting(100, turn=20)
    stops = [stopping_epoch(values, "min", 100, preset) for preset in ("fast", "balanced", "safe")]
    assert stops == sorted(stops)
    assert 20 < stops[-1] < 60


def test_steady_progress_is_not_stopped() -> None:
    assert stopping_epoch(1 - np.arange(100) / 200, "min", 100, "fast") is None


def test_modes_are_mirror_images() -> None:
    values = overfitting(100, turn=20)
    assert stopping_epoch(values, "min", 100) == stopping_epoch(5 - values, "max", 100)


def test_min_improvement_is_the_expected_improvement_at_which_it_stops() -> None:
    values = overfitting(80, turn=20)
    stop = stopping_epoch(values, "min", 80, min_improvement=0.01)
    assert stop is not None
    expected = [forecast(values[:n], "min", 80).expected_improvement for n in range(3, stop + 1)]
    assert expected[-1] < 0.01
    assert min(expected[:-1]) >= 0.01


def test_the_end_of_the_budget_is_no_stop() -> None:
    for budget, stops in ((40, False), (41, True)):
        rule = PredictiveStopping("min", min_improvement=1.0)
        for value in overfitting(40, turn=20):
            decision = rule.update(value, budget=budget)
        assert decision.stop == stops


def test_a_budget_already_exceeded_is_no_error() -> None:
    rule = PredictiveStopping("min")
    for value in falling(5):
        decision = rule.update(value, budget=2)
    assert not decision.stop


def test_a_horizon_looks_no_farther() -> None:
    values = falling(20, 0.01)
    near, far = PredictiveStopping("min", horizon=2), PredictiveStopping("min")
    for value in values:
        a, b = near.update(value, budget=200), far.update(value, budget=200)
    assert a.forecast is not None
    assert b.forecast is not None
    assert a.forecast == forecast(values, "min", 22)
    assert a.forecast.expected_improvement < b.forecast.expected_improvement


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_three_missing_values_in_a_row_are_divergence(missing: float) -> None:
    rule = PredictiveStopping("min")
    for value in [1.0, 0.5, missing, missing, 0.4, missing, missing]:
        assert not rule.update(value, budget=100).stop
    decision = rule.update(missing, budget=100)
    assert (decision.stop, decision.cause) == (True, "diverged")
    assert decision.reason == (
        "3 evaluations in a row were not finite; stopping saves 92 evaluations"
    )


def test_a_diverged_run_waits_for_no_drop_but_is_held_where_the_user_says_so() -> None:
    for why, stopped in (("wait", True), ("hold", False)):
        rule = PredictiveStopping("min")
        for value in [1.0, math.nan, math.nan, math.nan]:
            decision = rule.update(value, budget=50, **{why: "it is early"})
        assert decision.stop == stopped
        assert decision.held == (None if stopped else "it is early")


def test_a_run_that_never_had_a_number_is_divergence() -> None:
    assert stopping_epoch([math.nan] * 10, "max", 10) == 3


def test_a_target_out_of_reach_stops_and_one_in_reach_does_not() -> None:
    values = 1 - np.arange(40) / 100
    stop = lived(values, 60, target=-10.0)
    assert stop is not None
    assert stop < 30
    assert lived(values, 60, target=0.65) is None
    rule = PredictiveStopping("min", target=-10.0)
    decision = [rule.update(v, budget=60) for v in values[:stop]][-1]
    assert decision.cause == "target"
    assert decision.reason.startswith("less than 5% chance of beating -10; expected gain ")


def test_a_target_already_beaten_stops_nothing() -> None:
    values = 1 - np.arange(40) / 100
    assert lived(values, 60, target=2.0) is None


def test_a_curve_unlike_any_falls_back_to_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["strategies.early_stopping.forecast"]  # its name is a function, too
    monkeypatch.setattr(module, "_STRANGE", -1.0)
    values = np.concatenate([falling(10), np.full(50, 1.0)])
    rule = PredictiveStopping("min", patience=7)
    decisions = [rule.update(v, budget=100) for v in values[:17]]
    assert [d.stop for d in decisions] == [False] * 16 + [True]
    assert decisions[-1].cause == "patience"
    assert "like none in the training set, so patience 7 decides" in decisions[-1].reason
    assert stopping_epoch(values, "min", 100) == 30  # the default patience of 20


def test_a_curve_that_never_moved_is_left_to_patience() -> None:
    assert stopping_epoch([0.1] * 60, "max", 60, "safe") == 21
    assert stopping_epoch([0.1] * 15 + [0.1 + i / 50 for i in range(45)], "max", 60, "safe") is None


def test_a_curve_that_stands_still_is_stopped() -> None:
    saturated = [0.5, 0.8, 0.95, 0.99] + [1.0] * 96
    assert stopping_epoch(saturated, "max", 100, "safe") == 5 + 20
    rule = PredictiveStopping("max", "safe", patience=5)
    decisions = [rule.update(v, budget=100) for v in saturated[:10]]
    assert [d.stop for d in decisions] == [False] * 9 + [True]
    assert decisions[-1].cause == "flat"
    assert decisions[-1].reason == (
        "the metric has not changed in 5 evaluations; stopping saves 90 evaluations"
    )


def test_what_holds_is_said_and_not_latched() -> None:
    values = overfitting(100, turn=20)
    rule = PredictiveStopping("min", "fast")
    stop = stopping_epoch(values, "min", 100, "fast")
    assert stop is not None
    for i, value in enumerate(values[: stop + 3]):
        hold = "min_epochs is 30" if i < stop + 2 else None
        decision = rule.update(value, budget=100, hold=hold)
        assert decision.stop == (hold is None)
        if i == stop:
            assert decision.held == "min_epochs is 30"
            assert decision.reason.endswith("; held, as min_epochs is 30")


def test_a_reason_in_the_users_words() -> None:
    rule = PredictiveStopping("min", min_improvement=1.0)
    reasons = [rule.update(v, budget=10, left="7 epochs").reason for v in (1.0, 0.5, 0.4)]
    assert reasons[0] == "too few evaluations to say anything"
    assert "% chance of improving; expected gain " in reasons[2]
    assert reasons[2].endswith("% of the range seen; stopping saves 7 epochs")


def test_improved_and_expected_best() -> None:
    rule = PredictiveStopping("max")
    decisions = [rule.update(v, budget=100) for v in (math.nan, 1.0, 2.0, 2.0, 4.0)]
    assert [d.improved for d in decisions] == [False, True, True, False, True]
    last = decisions[-1]
    assert last.forecast is not None
    assert last.expected_best == pytest.approx(4.0 + 3.0 * last.forecast.expected_improvement)
    assert math.isnan(decisions[0].expected_best)


def test_without_a_number_there_is_no_best() -> None:
    rule = PredictiveStopping("min")
    decisions = [rule.update(math.nan, budget=9) for _ in range(4)]
    assert all(math.isnan(d.expected_best) for d in decisions)


def test_a_value_that_is_none_leaves_no_trace() -> None:
    rule = PredictiveStopping("min")
    rule.update(1.0)
    with pytest.raises(ValueError, match="could not convert"):
        rule.update(0.5, "x")  # type: ignore[arg-type]
    assert rule.state_dict()["values"] == [1.0]


def test_state_survives_json_and_decides_the_same() -> None:
    values, train = overfitting(60, turn=15), falling(60)
    whole = PredictiveStopping("min")
    expected = [whole.update(v, t, 100) for v, t in zip(values, train, strict=True)]
    first = PredictiveStopping("min")
    for v, t in zip(values[:20], train[:20], strict=True):
        first.update(v, t, 100)
    second = PredictiveStopping("min")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [second.update(v, t, 100) for v, t in zip(values[20:], train[20:], strict=True)]
    assert rest == expected[20:]
    second.reset()
    assert second.state_dict() == PredictiveStopping("min").state_dict()


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "mode must be 'min' or 'max', got 'auto'", {"mode": "auto"}),
        (ValueError, "preset must be one of safe, balanced, fast, got 'bold'", {"preset": "bold"}),
        (ValueError, "min_improvement must be between 0 and 1, got 2", {"min_improvement": 2}),
        (TypeError, "min_improvement must be a number, got '1%'", {"min_improvement": "1%"}),
        (ValueError, "target must be finite, got nan", {"target": math.nan}),
        (ValueError, "p_target must be between 0 and 1, got 5", {"p_target": 5}),
        (ValueError, "horizon must be at least 1, got 0", {"horizon": 0}),
        (TypeError, "horizon must be a whole number, got 2.5", {"horizon": 2.5}),
        (TypeError, "patience must be a whole number, got True", {"patience": True}),
    ],
)
def test_bad_arguments(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        PredictiveStopping(**({"mode": "min"} | options))
