"""Plans against all plans there are, against simpler rules, and on long chains."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import pytest

from strategies.checkpointing import Block, Partial, Span, plan_recompute
from tests.strategies.checkpointing.exhaustive import Choice, choices, walked


def drawn(seed: int, count: int, partial: bool = True) -> list[Block]:
    rng = random.Random(seed)
    blocks = []
    for i in range(count):
        sizes = rng.randint(3, 20), rng.randint(1, 3), rng.randint(1, 9), rng.randint(0, 4)
        ways = [
            Partial(rng.randint(1, 3), rng.randint(1, 3), rng.randint(3, sizes[0]))
            for _ in range(partial and rng.randint(0, 1))
        ]
        loose = rng.choice((0, sizes[1], rng.randint(0, sizes[1])))
        handed = rng.randint(0, min([sizes[1] - loose, *(way.saved for way in ways)]))
        blocks.append(Block(f"block{i}", *sizes, tuple(ways), loose, handed))
    return blocks


def alike(count: int, output: int = 10) -> list[Block]:
    return [Block(f"layer{i}", 100, output, 1.0) for i in range(count)]


@pytest.mark.parametrize("seed", range(12))
def test_as_good_as_the_best_of_all_plans(seed: int) -> None:
    rng = random.Random(seed)
    blocks = drawn(seed, 1 + seed % 5)
    last = len(blocks) - 1
    every = {(a, b) for a in range(last + 1) for b in range(a + 1, last + 2)}
    allowed = every if seed % 2 else {span for span in every if rng.random() < 0.5}
    known = [walked(blocks, choice, 0, last) for choice in choices(blocks, allowed, 0, last)]
    for budget in range(100):
        plan = plan_recompute(blocks, budget, None if seed % 2 else allowed)
        fitting = [extra for peak, extra in known if peak <= budget]
        assert plan.fits == bool(fitting)
        if fitting:
            assert plan.extra == min(fitting)
        else:
            assert plan.peak == min(peak for peak, _ in known)
        peak, extra = walked(blocks, (plan.spans, plan.partial), 0, last)
        assert peak <= plan.peak
        assert extra == plan.extra


@pytest.mark.parametrize("seed", range(6))
def test_twelve_blocks_without_nesting_at_most_the_best_subset(seed: int) -> None:
    blocks = drawn(100 + seed, 12, partial=False)
    known = []
    for kept in product((False, True), repeat=11):
        spans = tuple(Span(i, i + 1) for i, keep in enumerate(kept) if not keep)
        known.append(walked(blocks, (spans, ()), 0, 11))
    plain, _ = walked(blocks, ((), ()), 0, 11)
    for share in (0.8, 0.6, 0.4, 0.2):
        budget = share * plain
        plan = plan_recompute(blocks, budget)
        subsets = [extra for peak, extra in known if peak <= budget]
        if subsets:
            assert plan.fits
            assert plan.extra <= min(subsets)
        single = plan_recompute(blocks, budget, [(i, i + 1) for i in range(12)])
        assert single.fits == bool(subsets)
        assert not subsets or single.extra == min(subsets)


def segments(blocks: Sequence[Block], count: int) -> Choice:
    """What `torch.utils.checkpoint.checkpoint_sequential` does: all segments but the last."""
    size = len(blocks) // count
    cuts = [i * size for i in range(count)]
    return tuple(Span(a, b) for a, b in pairwise(cuts)), ()


def every(blocks: Sequence[Block], k: int) -> Choice:
    return tuple(Span(i, i + 1) for i in range(0, len(blocks) - 1, k)), ()


@pytest.mark.parametrize("blocks", [alike(24), alike(24, output=50), drawn(7, 24, partial=False)])
def test_never_dearer_than_simpler_rules_at_their_peak(blocks: list[Block]) -> None:
    rules = [segments(blocks, n) for n in range(2, 13)] + [every(blocks, k) for k in range(1, 7)]
    for rule in rules:
        peak, extra = walked(blocks, rule, 0, 23)
        plan = plan_recompute(blocks, peak)
        assert plan.fits
        assert plan.extra <= extra


def test_half_of_a_transformer() -> None:
    """Blocks of 100 bytes that leave 6: as few as possible, 13 of 24, unless parts are cheaper."""
    plan = plan_recompute(alike(24, output=6), 1200)
    fewest = next(n for n in range(24) if (23 - n) * 100 + n * 6 + 100 <= 1200)
    assert plan.fits
    assert plan.extra == fewest == 13
    # Without the products of matrices, which are most of the work, a block leaves 45.
    cheaper = [
        Block(f"layer{i}", 100, 6, 1.0, partial=(Partial(45, 0.02, 100),)) for i in range(24)
    ]
    assert plan_recompute(cheaper, 1200).extra / (3 * 24) <= 0.01


@pytest.mark.parametrize("count", [24, 36])
def test_more_memory_never_costs_more(count: int) -> None:
    blocks = drawn(3, count)
    plain = plan_recompute(blocks, 10**9).plain_peak
    plans = [plan_recompute(blocks, plain * share / 20) for share in range(1, 21)]
    assert [p.peak for p in plans] == sorted(p.peak for p in plans)
    assert [p.extra for p in plans] == sorted((p.extra for p in plans), reverse=True)
    assert plans[-1].spans == plans[-1].partial == ()
    for plan in plans:
        found = walked(blocks, (plan.spans, plan.partial), 0, count - 1)
        assert found[0] <= plan.peak
        assert found[1] == pytest.approx(plan.extra)


def test_nesting_reaches_lower_than_one_level() -> None:
    blocks = alike(24, output=50)
    nested, flat = (
        plan_recompute(blocks, 0),
        plan_recompute(blocks, 0, [(i, i + 1) for i in range(24)]),
    )
    assert nested.peak < flat.peak / 2
    assert any(span.inner for span in nested.spans)


@pytest.mark.parametrize(
    ("blocks", "budget", "spans", "error", "message"),
    [
        ([], 1, None, ValueError, "blocks is empty"),
        ([Block("a", -1, 0, 1)], 1, None, ValueError, "block 'a': -1 must be finite and not"),
        ([Block("a", 1, 0, float("nan"))], 1, None, ValueError, "block 'a': nan must be finite"),
        ([Block("a", True, 0, 1)], 1, None, TypeError, "block 'a': True must be a number"),
        ([Block("a", 1, 0, 1)], "1GiB", None, TypeError, "budget: '1GiB' must be a number"),
        ([Block("a", 1, 0, 1)], -1, None, ValueError, "budget: -1 must be finite"),
        ([Block("a", 1, 0, 1)], 1, [(0, 2)], ValueError, r"spans: \(0, 2\) must be a"),
    ],
)  # fmt: skip
def test_bad_arguments(
    blocks: list[Block], budget: Any, spans: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_recompute(blocks, budget, spans)
