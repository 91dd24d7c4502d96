"""Which consecutive parts of a model go to which stage of the pipeline."""

from __future__ import annotations

import math
import reprlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Integral, Real

from strategies.parallel.layout import check_whole


def partition(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Cut a sequence of parts into stages whose costs are as even as possible.

    The slowest stage sets the pace of a pipeline, so the most expensive one is made as cheap as
    any cut allows. Among such cuts the least sum of squared stage costs wins; among those the one
    whose last stage has the fewest parts, then the last but one, and so on, as later stages
    usually carry what is not counted: the norm, the head, the loss. Sums are exact, so the result
    is the same on every machine.

    Args:
        costs: Cost of each part in order, in any unit: seconds, parameters, operations.
        stages: Number of stages; each has at least one part.

    Returns:
        Number of parts in each stage.

    Raises:
        TypeError: A cost is not a number, or `stages` is not a whole number.
        ValueError: A cost is negative or not finite, or there are more stages than parts.

    Example:
        >>> partition([1, 1, 1, 1, 4], 2)
        (4, 1)
        >>> partition([1] * 7, 3)
        (3, 2, 2)
    """
    check_whole("stages", stages, "pass 1 for a single stage")
    exact = _exact(costs)
    if stages > len(exact):
        possible = f"pass at most {len(exact)}" if exact else "pass the cost of each part"
        raise ValueError(f"stages={stages} is more than the {len(exact)} parts; {possible}")
    sums = [0, *accumulate(exact)]
    return _least_squares(sums, stages, _least_maximum(sums, stages))


def checked_counts(
    layers_per_stage: Sequence[int], stages: int, parts: Sequence[str]
) -> tuple[int, ...]:
    """The user's own cut, if it fits.

    Args:
        layers_per_stage: Number of parts in each stage.
        stages: Number of stages.
        parts: Names of the parts in order.

    Returns:
        `layers_per_stage` as a tuple.

    Raises:
        TypeError: `layers_per_stage` is not a list of whole numbers.
        ValueError: It has another length than `stages`, an empty stage or another sum than there
            are parts.

    Example:
        >>> checked_counts([2, 1], 2, ["embed", "block", "head"])
        (2, 1)
    """
    if isinstance(layers_per_stage, (str, bytes)) or not isinstance(layers_per_stage, Sequence):
        raise TypeError(
            f"layers_per_stage={layers_per_stage!r} must be a list of {stages} whole numbers"
        )
    counts = tuple(layers_per_stage)
    shown = f"layers_per_stage={reprlib.repr(list(counts))}"
    names = ", ".join(parts if len(parts) <= 6 else [*parts[:4], "...", parts[-1]])
    there_are = f"there are {len(parts)} parts ({names})"
    for i, count in enumerate(counts):
        hint = f"every stage has at least one part; {there_are}"
        check_whole(f"layers_per_stage[{i}]", count, hint)
    if len(counts) != stages:
        raise ValueError(
            f"{shown} has {len(counts)} numbers for {stages} stages; pass one per stage; "
            f"{there_are}"
        )
    if sum(counts) != len(parts):
        raise ValueError(
            f"{shown} adds up to {sum(counts)}, but {there_are}; pass {stages} numbers that add "
            f"up to {len(parts)}"
        )
    return counts


def bounds(counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """First part of each stage and the first that is no more in it.

    Args:
        counts: Number of parts in each stage.

    Example:
        >>> bounds((3, 2, 2))
        ((0, 3), (3, 5), (5, 7))
    """
    ends = tuple(accumulate(counts))
    return tuple(zip((0, *ends[:-1]), ends, strict=True)) if ends else ()


def _exact(costs: Sequence[float]) -> list[int]:
    """The costs in a unit in which all are whole: sums of floats depend on their order."""
    found: list[Fraction] = []
    for i, cost in enumerate(costs):
        value: object = cost
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"costs[{i}]={cost!r} must be a number >= 0")
        whole = isinstance(value, Integral)  # may be too large for a float
        if cost < 0 or not (whole or math.isfinite(cost)):
            raise ValueError(f"costs[{i}]={cost!r} must be finite and >= 0; pass 0 for a free part")
        found.append(Fraction(int(cost) if whole else float(cost)))
    unit = math.lcm(*(cost.denominator for cost in found))
    return [int(cost * unit) for cost in found]


def _least_maximum(sums: Sequence[int], stages: int) -> int:
    """Cost of the most expensive stage in the best cut; `sums[j]` is the cost of the first `j`."""
    low = max(b - a for a, b in pairwise(sums))
    high = sums[-1]
    while low < high:
        middle = (low + high) // 2
        # Cutting once more never makes a stage dearer, so reaching the end early does no harm.
        if _reached(sums, stages, middle)[-1] == len(sums) - 1:
            high = middle
        else:
            low = middle + 1
    return low


def _reached(sums: Sequence[int], stages: int, most: int) -> list[int]:
    """How many parts fit into the first 0, 1, 2 ... stages of at most some cost."""
    reached = [0]
    for _ in range(stages):
        reached.append(bisect_right(sums, sums[reached[-1]] + most) - 1)
    return reached


def _least_squares(sums: Sequence[int], stages: int, most: int) -> tuple[int, ...]:
    """The cut with the least sum of squares among those with no stage above `most`.

    Row `stage` of the dynamic program has the least sum for the first `end` parts in that many
    stages, and where the last of these begins. Squares of sums fulfil the quadrangle inequality,
    and the limit on the cost does no harm to it, so that the best beginnings ascend with the end.
    """
    parts = len(sums) - 1
    reached = _reached(sums, stages, most)
    best = {0: 0}
    begins: list[dict[int, int]] = []
    for stage in range(1, stages + 1):
        last = stage == stages
        ends = range(parts if last else stage, min(reached[stage], parts - stages + stage) + 1)
        best, begin = _row(sums, most, best, ends)
        begins.append(begin)
    counts: list[int] = []
    end = parts
    for begin in reversed(begins):
        counts.append(end - begin[end])
        end = begin[end]
    return tuple(reversed(counts))


def _row(
    sums: Sequence[int], most: int, before: dict[int, int], ends: range
) -> tuple[dict[int, int], dict[int, int]]:
    """One more stage: least sum of squares and its latest beginning, by end of the stage.

    The end in the middle is solved first and bounds where those on either side may begin.
    """
    best: dict[int, int] = {}
    begins: dict[int, int] = {}
    todo = [(ends.start, ends.stop, min(before), max(before))]
    while todo:
        first, stop, lowest, highest = todo.pop()
        if first >= stop:
            continue
        end = (first + stop) // 2
        total = sums[end]
        fits = max(lowest, bisect_left(sums, total - most))
        candidates = range(fits, min(highest, end - 1) + 1)
        value, begin = min((before[i] + (total - sums[i]) ** 2, -i) for i in candidates)
        best[end], begins[end] = value, -begin
        todo += [(first, end, lowest, -begin), (end + 1, stop, -begin, highest)]
    return best, begins
