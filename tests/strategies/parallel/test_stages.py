"""Cuts into stages, against every possible cut of small cases."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from strategies.parallel import partition
from strategies.parallel.stages import bounds, checked_counts


def cuts(parts: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, parts), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *inner, parts)))


def by_brute_force(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    exact = [Fraction(cost) for cost in costs]

    def rank(counts: tuple[int, ...]) -> tuple[Any, ...]:
        sums = [sum(exact[begin:end], Fraction()) for begin, end in bounds(counts)]
        return max(sums), sum(s * s for s in sums), counts[::-1]

    return min(cuts(len(costs), stages), key=rank)


def random_costs(seed: int) -> list[float]:
    draw = random.Random(seed)
    kinds = (
        lambda: draw.randint(0, 1),
        lambda: draw.randint(0, 3),
        lambda: draw.choice([0, 0, 0, 1, 5]),
        lambda: draw.choice([0.1, 0.2, 0.3]),
        draw.random,
        lambda: 10 ** draw.uniform(-9, 9),
        lambda: 1,
        lambda: 0,
    )
    return [kinds[seed % len(kinds)]() for _ in range(draw.randint(1, 9))]


@pytest.mark.parametrize("seed", range(400))
def test_the_best_of_all_cuts(seed: int) -> None:
    costs = random_costs(seed)
    for stages in range(1, len(costs) + 1):
        assert partition(costs, stages) == by_brute_force(costs, stages), (costs, stages)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_best_of_all_cuts_where_ties_abound(stages: int) -> None:
    for costs in itertools.product((0, 1, 2), repeat=6):
        assert partition(costs, stages) == by_brute_force(costs, stages), costs


def test_the_second_aim_tells_cuts_with_the_same_slowest_stage_apart() -> None:
    # Both have a slowest stage of 9; a greedy fill from the left would take the first.
    assert partition([9, 4, 4, 1], 3) == (1, 1, 2)
    assert partition([1, 4, 4, 9], 3) == (2, 1, 1)


def test_equal_parts_differ_by_one_at_most_and_later_stages_have_fewer() -> None:
    for parts, stages in itertools.product(range(1, 40), range(1, 12)):
        if stages <= parts:
            few, more = divmod(parts, stages)
            expected = (few + 1,) * more + (few,) * (stages - more)
            assert partition([0.1] * parts, stages) == expected


def test_free_parts_go_to_the_front() -> None:
    assert partition([0] * 5, 3) == (3, 1, 1)


def test_numbers_of_any_kind() -> None:
    assert partition(list(np.array([1.0, 1.0, 2.0], dtype=np.float32)), 2) == (2, 1)
    assert partition(list(np.array([1, 1, 2])), 2) == (2, 1)
    assert partition([10**400, 10**400, 2 * 10**400], 2) == (2, 1)
    assert partition([Fraction(1, 3), Fraction(2, 3)], 1) == (2,)  # type: ignore[list-item]
    assert partition([1e308] * 4, 2) == (2, 2)
    assert partition([5e-324, 5e-324, 1e-323], 2) == (2, 1)


def test_the_unit_does_not_matter() -> None:
    costs = [0.375, 1.5, 2.25, 0.125, 3.0, 0.5, 1.0, 1.0]
    for stages in range(1, 9):
        assert (
            len({partition([c * unit for c in costs], stages) for unit in (1, 1024, 2**-40)}) == 1
        )


@pytest.mark.parametrize("kind", ["equal", "free", "random", "one large", "mostly free"])
def test_a_thousand_parts_take_no_time(kind: str) -> None:
    draw = random.Random(0)
    costs = {
        "equal": [1.0] * 1000,
        "free": [0.0] * 1000,
        "random": [draw.random() for _ in range(1000)],
        "one large": [*(draw.random() for _ in range(999)), 1e6],
        "mostly free": [float(i % 100 == 50) for i in range(1000)],
    }[kind]
    start = time.process_time()
    counts = partition(costs, 64)
    assert time.process_time() - start < 2
    assert len(counts) == 64
    assert sum(counts) == 1000
    assert min(counts) >= 1


@pytest.mark.parametrize(
    ("costs", "stages", "error", "message"),
    [
        ([1, 1, 1], 4, ValueError, "stages=4 is more than the 3 parts; pass at most 3"),
        ([], 1, ValueError, "stages=1 is more than the 0 parts; pass the cost of each"),
        ([1], 0, ValueError, "stages=0 must be a whole number >= 1"),
        ([1], True, TypeError, "stages=True"),
        ([1], 1.0, TypeError, r"stages=1\.0"),
        ([1, -1], 1, ValueError, r"costs\[1\]=-1 must be finite and >= 0"),
        ([math.nan], 1, ValueError, r"costs\[0\]=nan"),
        ([1, 2, math.inf], 1, ValueError, r"costs\[2\]=inf"),
        (["1"], 1, TypeError, r"costs\[0\]='1' must be a number"),
        ([1, True], 1, TypeError, r"costs\[1\]=True"),
        ([1, None], 1, TypeError, r"costs\[1\]=None"),
    ],
)
def test_arguments(costs: Any, stages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        partition(costs, stages)


def test_bounds() -> None:
    assert bounds((2, 1, 3)) == ((0, 2), (2, 3), (3, 6))
    assert bounds([4]) == ((0, 4),)
    assert bounds(()) == ()


PARTS = ["embed", *(f"blocks.{i}" for i in range(8)), "head"]


def test_own_cut() -> None:
    assert checked_counts([3, 7], 2, PARTS) == (3, 7)
    assert checked_counts((10,), 1, PARTS) == (10,)


@pytest.mark.parametrize(
    ("own", "stages", "error", "message"),
    [
        ([5, 5], 3, ValueError, r"layers_per_stage=\[5, 5\] has 2 numbers for 3 stages"),
        ([], 2, ValueError, r"layers_per_stage=\[\] has 0 numbers for 2 stages"),
        ([5, 4], 2, ValueError, r"layers_per_stage=\[5, 4\] adds up to 9, but there are 10 parts"),
        (
            [0, 10],
            2,
            ValueError,
            r"layers_per_stage\[0\]=0 must .* at least one part; there are 10",
        ),
        ([11, -1], 2, ValueError, r"layers_per_stage\[1\]=-1"),
        ([5, 5.0], 2, TypeError, r"layers_per_stage\[1\]=5\.0"),
        ([9, True], 2, TypeError, r"layers_per_stage\[1\]=True"),
        ("55", 2, TypeError, "layers_per_stage='55' must be a list of 2 whole numbers"),
        (10, 1, TypeError, "layers_per_stage=10 must be a list of 1 whole number"),
        (None, 2, TypeError, "layers_per_stage=None"),
    ],
)
def test_own_cut_that_does_not_fit(
    own: Any, stages: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        checked_counts(own, stages, PARTS)


def test_names_are_shortened() -> None:
    with pytest.raises(
        ValueError, match=r"\(embed, blocks\.0, blocks\.1, blocks\.2, \.\.\., head\)"
    ):
        checked_counts([1, 1], 2, PARTS)
    with pytest.raises(ValueError, match=r"there are 3 parts \(a, b, c\); pass 2 numbers that add"):
        checked_counts([1, 1], 2, ["a", "b", "c"])
