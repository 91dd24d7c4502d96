"""How many evaluations are left, in cases that can be worked out by hand."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from lightning_ext._progress import Position, remaining

START = Position(0, 0, 0, 0)


def at(epochs: float = nan, steps: float = 0, seconds: float = 0, finished: int = 0) -> Position:
    return Position(epochs, steps, seconds, finished)


@pytest.mark.parametrize(
    ("begun", "now", "end", "done", "unit", "left", "text"),
    [
        (START, at(41, 410), at(100, inf, inf), 41, "epoch", 59, "59 epochs"),
        (START, at(99, 990), at(100, inf, inf), 99, "epoch", 1, "1 epoch"),
        (START, at(100, 1000), at(100, inf, inf), 100, "epoch", 0, "0 epochs"),
        # Every third epoch of eleven: three in all, whatever comes after the last.
        (START, at(3, 30), at(11, inf, inf), 1, "epoch", 2, "8 epochs"),
        (START, at(9, 90), at(11, inf, inf), 3, "epoch", 0, "2 epochs"),
        # Four in an epoch of 10 steps.
        (START, at(0.75, 7), at(3, inf, inf), 3, "step", 9, "21 steps"),
        (START, at(nan, 200), at(inf, 1000, inf), 2, "step", 8, "800 steps"),
        # Whichever limit comes first.
        (START, at(5, 50), at(100, 80, inf), 5, "epoch", 3, "3 epochs"),
        (START, at(5, 50, 10), at(100, 800, 30), 5, "epoch", 10, "10 epochs"),
        # Joined in the middle: the evaluations before were not its own.
        (at(10, 100), at(12, 120), at(20, inf, inf), 2, "epoch", 8, "8 epochs"),
        (START, at(5, 50), at(inf, inf, inf), 5, "epoch", None, None),
        (START, at(7, 70), at(5, inf, inf), 7, "epoch", 0, "0 epochs"),
    ],
)
def test_remaining(
    begun: Any, now: Any, end: Any, done: int, unit: str, left: int | None, text: str | None
) -> None:
    rest = remaining(begun, now, end, done, unit)
    assert (rest.evaluations, rest.text) == (left, text)
