"""How many evaluations a fit will have, by hand."""

from __future__ import annotations

import json
import math

import pytest

from keras_ext._evaluations import Evaluations


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("epochs", [10, 11, 30])
@pytest.mark.parametrize("first", [0, 30])
def test_planned_is_exact_for_every_validation_freq(every: int, epochs: int, first: int) -> None:
    """Keras evaluates after the epochs `every - 1`, `2 * every - 1`, …; from the first one on."""
    ends = [e for e in range(first, first + epochs) if (e + 1) % every == 0]
    evaluations = Evaluations(first)
    for end in ends:
        evaluations.epochs.append(end)
        assert evaluations.every == every
        assert evaluations.planned(first + epochs) == len(ends)


@pytest.mark.parametrize(
    ("epochs", "in_all", "expected"),
    [
        ([0, 1, 2], None, None),
        ([0, 1, 2], 3, 3),
        ([0, 1, 2], 2, 3),  # a loop of the user's own, beyond what it promised
        ([7], 100, 1 + 92 // 8),  # nothing else known than that the first one took 8 epochs
        ([0, 1, 2, 10, 11], 20, 5 + 8),  # a gap, as a resumed fit may have
        ([-3, -2, -1, 0], 10, 4 + 9),
    ],
)
def test_planned_by_hand(epochs: list[int], in_all: int | None, expected: int | None) -> None:
    assert Evaluations(epochs=epochs).planned(in_all) == expected


def test_cut_keeps_what_came_before() -> None:
    evaluations = Evaluations(0, [1, 3, 5, 7], [0.1, 0.2, 0.3, 0.4], [1, 5])
    assert evaluations.cut(5) == 2
    assert evaluations == Evaluations(0, [1, 3], [0.1, 0.2], [1])
    assert evaluations.cut(0) == 0
    assert evaluations == Evaluations()


def test_state_is_strict_json() -> None:
    evaluations = Evaluations(2, [3, 4], [math.nan, 0.5], [3])
    state = json.loads(json.dumps(evaluations.state_dict(), allow_nan=False))
    again = Evaluations()
    again.load_state_dict(state)
    assert again.state_dict() == evaluations.state_dict()
    assert math.isnan(again.rates[0])
