"""What reports say, against plans and a walk through a step of another hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from strategies.checkpointing import (
    Block,
    MemoryReport,
    Partial,
    RecomputePlan,
    Span,
    plan_recompute,
)
from strategies.checkpointing.budget import check_budget, written
from strategies.checkpointing.report import timeline
from tests.strategies.checkpointing.exhaustive import walked
from tests.strategies.checkpointing.test_recompute import drawn


@pytest.mark.parametrize("seed", range(10))
def test_highest_of_the_timeline_is_the_peak(seed: int) -> None:
    blocks = drawn(seed, 3 + seed)
    for share in (1.0, 0.7, 0.5, 0.3, 0.0):
        plan = plan_recompute(blocks, share * sum(b.saved for b in blocks))
        events = timeline(blocks, plan)
        assert max(size for _, size in events) == plan.peak
        assert walked(blocks, (plan.spans, plan.partial), 0, len(blocks) - 1)[0] == plan.peak
        assert events[-1] == ("end", 0)
        backward = [what.split()[0] for what, _ in events if what.endswith("backward")]
        assert backward == [b.name for b in reversed(blocks)]  # each once, from the last


def report() -> MemoryReport:
    blocks = (
        Block("embed", 100, 50, 1.0),
        Block("middle", 1000, 50, 10.0, partial=(Partial(600, 1.0, 900),)),
        Block("head", 300, 10, 5.0),
    )
    inner = (Span(1, 2),)
    plan = RecomputePlan((Span(0, 2, inner),), (), 1200, 21.0, 1400, 16.0, 1250)
    return MemoryReport("8x3", blocks, plan, 1190, ("attention could be lighter",))


def test_what_is_told() -> None:
    found = report()
    assert found.saved == 200
    assert found.extra == 21 / 48
    assert found.treatment == ("run again 1x", "run again 2x", "kept")
    text = found.explain(2)
    assert "activations 1.37 KiB in the plain run, 1.17 KiB predicted with this plan" in text
    assert "43.8% of its blocks' operations run again" in text
    lines = [line for line in text.splitlines() if "middle" in line or "head" in line]
    assert ["1000 bytes" in lines[0], "71.4%" in lines[0], "run again 2x" in lines[0]] == [True] * 3
    assert "kept" in lines[1]
    assert "embed" not in text
    assert text.endswith("... and 1 more\nattention could be lighter")
    assert "more" not in found.explain(3)
    assert "of blocks' work" in text


def test_work_outside_of_blocks_is_part_of_a_step() -> None:
    found = replace(report(), forward=32.0)
    assert found.extra == 21 / 96
    assert "21.9% of a step's operations run again" in str(found)
    assert any("middle" in line and "31.2%" in line for line in found.explain().splitlines())


def test_blocks_that_save_less_are_told() -> None:
    blocks = report().blocks
    plan = RecomputePlan((), ((1, 0),), 1000, 1.0, 1400, 16.0, 1000)
    assert MemoryReport("8", blocks, plan).treatment == ("kept", "kept, holding 600 bytes", "kept")


def test_plot() -> None:
    found = report()
    axes = found.plot()
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["plain", "as planned", "budget"]
    plain = axes.get_lines()[0].get_ydata()
    assert max(plain) * 2**20 == 1400
    assert found.plot(axes) is axes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", "auto"),
        (0.5, 0.5),
        (1.0, 1.0),
        (2**30, 2**30),
        ("6GiB", 6 * 2**30),
        ("1.5 gb", 1_500_000_000),
        ("512 MB", 512_000_000),
        ("100k", 100_000),
        ("4096", 4096),
        (np.float32(0.5), 0.5),
        (np.int64(4096), 4096),
    ],
)
def test_budgets(given: Any, expected: Any) -> None:
    found = check_budget(given)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "given",
    [
        0,
        1,
        -1,
        0.0,
        1.5,
        -0.5,
        float("nan"),
        "",
        "GiB",
        "-1GB",
        "0",
        10**400,
        "9" * 400,
        "9999999TB",
    ],
)
def test_budgets_out_of_range(given: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget="):
        check_budget(given)


@pytest.mark.parametrize("given", [None, True, [1], b"6GiB"])
def test_budgets_of_the_wrong_type(given: Any) -> None:
    with pytest.raises(TypeError, match="memory_budget="):
        check_budget(given)


def test_sizes_for_people() -> None:
    assert [written(n) for n in (0, 1023, 1024, 5 * 2**20, 3 * 2**40)] == [
        "0 bytes", "1023 bytes", "1.00 KiB", "5.00 MiB", "3.00 TiB",
    ]  # fmt: skip
