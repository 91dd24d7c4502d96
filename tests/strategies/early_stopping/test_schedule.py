"""Schedules as formulas, seen from each evaluation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from strategies.early_stopping.schedule import reason_to_wait

EPOCHS = 60
SMOOTH = {
    "constant": lambda e: 1.0,
    "cosine": lambda e: 0.5 * (1 + math.cos(math.pi * e / EPOCHS)),
    "linear": lambda e: 1 - e / EPOCHS,
    "exponential": lambda e: 0.9**e,
    "halved each time": lambda e: 0.5**e,
    "to nothing": lambda e: 1.0 if e < 40 else 1e-5,
}


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("length", [4, 10, EPOCHS])
def test_smooth_decay_is_no_reason(name: str, length: int) -> None:
    rates = [SMOOTH[name](EPOCHS * e / length) for e in range(length)]
    for now in range(1, length):
        assert reason_to_wait(rates[:now], rates[now:]) is None


def test_a_drop_is_a_reason_until_it_has_come() -> None:
    rates = np.where(np.arange(EPOCHS) < 30, 0.1, 0.01)
    said = [reason_to_wait(rates[:now], rates[now:]) for now in range(1, EPOCHS)]
    assert said[:30] == ["the learning rate is still to drop"] * 30
    assert not any(said[30:])


def test_a_drop_by_less_than_half_is_none() -> None:
    assert reason_to_wait([1.0, 1.0], [0.6]) is None
    assert reason_to_wait([1.0, 1.0], [0.5]) is not None


def test_warm_up() -> None:
    rates = [min(1.0, (e + 1) / 10) for e in range(20)]
    said = [reason_to_wait(rates[:now], rates[now:]) for now in range(1, 20)]
    assert said[0] == "the learning rate still rises"
    assert not any(said[9:])


def test_restarts_of_a_cosine_are_no_warm_up() -> None:
    rates = [0.5 * (1 + math.cos(math.pi * (e % 10) / 10)) for e in range(30)]
    assert reason_to_wait(rates[:5], rates[5:]) is None


@pytest.mark.parametrize(
    ("past", "ahead"), [([], [1.0]), ([1.0], []), ([1.0], [math.nan]), ([0.0] * 3, [0.0] * 2)]
)
def test_nothing_known_is_no_reason(past: list[float], ahead: list[float]) -> None:
    assert reason_to_wait(past, ahead) is None


def test_three_drops_by_ten_count_whatever_the_rounding() -> None:
    rates = np.repeat([1.0, 0.1, 0.01, 0.001, 0.0001], 5)
    for kind in (np.float32, np.float64):
        said = [reason_to_wait(rates.astype(kind)[:n], rates.astype(kind)[n:]) for n in (14, 19)]
        assert said == ["the learning rate is still to drop", None]


@pytest.mark.parametrize("pace", [1, 2, 4, 7])
@pytest.mark.parametrize("epochs", [12, 20, 60, 200])
@pytest.mark.parametrize("kind", ["cosine", "square", "linear", "exponential"])
def test_smooth_decay_is_none_at_any_number_of_evaluations_per_step(
    kind: str, epochs: int, pace: int
) -> None:
    left = 1 - np.arange(epochs) / epochs
    decays = {
        "cosine": (1 + np.cos(np.pi * (1 - left))) / 2,
        "square": left**2,
        "linear": left,
        "exponential": 0.8 ** np.arange(epochs),
    }
    rates = np.repeat(decays[kind], pace)
    for done in range(3 * pace, len(rates), 3):
        assert reason_to_wait(rates[:done], rates[done:]) is None


@pytest.mark.parametrize("pace", [1, 4])
@pytest.mark.parametrize("factor", [0.1, 0.5])
def test_steps_are_drops_at_any_number_of_evaluations_per_epoch(factor: float, pace: int) -> None:
    rates = np.repeat(factor ** (np.arange(30) // 10).astype(float), pace)
    assert reason_to_wait(rates[: 5 * pace], rates[5 * pace :]) is not None
    assert reason_to_wait(rates[: 15 * pace], rates[15 * pace :]) is not None
    assert reason_to_wait(rates[: 20 * pace + 1], rates[20 * pace + 1 :]) is None
