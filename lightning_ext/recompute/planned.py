"""What is planned for batches of one kind, and how it is told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_ext._compat import rank_zero_warn
from lightning_ext.recompute.blocks import Applied, Table
from lightning_ext.recompute.microbatched import Microbatched
from strategies.checkpointing import MemoryReport
from strategies.checkpointing.budget import written

_KINDS = 16  # of batches, after which others follow the nearest
_NEAR = 1.1  # how much larger than what was measured

Shapes = tuple[tuple[int, ...], ...]


@dataclass
class Planned:
    """What is done with batches of one kind.

    Args:
        table: Blocks of a step, as measured.
        applied: What is run again.
        report: For people.
        tries: How often it was corrected, or measured anew.
    """

    table: Table | Microbatched
    applied: Applied
    report: MemoryReport
    tries: int = 0


def kinds_of(name: str, value: Any) -> tuple[type[nn.Module] | str, ...]:
    """Classes of modules and names, checked.

    Args:
        name: Of the argument.
        value: That was passed.
    """
    if not isinstance(value, (str, type, Iterable)) or isinstance(value, nn.Module):
        raise TypeError(f"{name}={value!r}: pass a list of classes of modules or of their names")
    found = (value,) if isinstance(value, (str, type)) else tuple(value)
    for kind in found:
        if not isinstance(kind, str) and not (
            isinstance(kind, type) and issubclass(kind, nn.Module)
        ):
            raise TypeError(f"{name}={value!r}: pass classes of modules or their names")
    return found


def somewhat_larger(known: Shapes, asked: Shapes) -> bool:
    """Whether every dimension is as large, and the whole at most twice as large."""
    if len(known) != len(asked) or any(len(a) != len(b) for a, b in zip(known, asked, strict=True)):
        return False
    pairs = [(a, b) for k, s in zip(known, asked, strict=True) for a, b in zip(k, s, strict=True)]
    return all(a >= b for a, b in pairs) and elements(known) <= 2 * elements(asked)


def plan_for(plans: Mapping[Shapes, Planned], shapes: Shapes) -> Planned | None:
    """The plan of somewhat larger batches; of the nearest ones where too many kinds are known.

    Args:
        plans: By shapes.
        shapes: Of a batch that has no plan of its own.
    """
    for known, planned in plans.items():
        if somewhat_larger(known, shapes):
            return planned
    if len(plans) < _KINDS:
        return None
    least = elements(shapes) / _NEAR
    enough = [known for known in plans if elements(known) >= least]
    return plans[min(enough, key=elements)] if enough else None


def elements(shapes: Shapes) -> int:
    """Of tensors of these shapes together."""
    return sum(map(math.prod, shapes))


def explain(kind: tuple[int, Shapes] | None, planned: Planned | None) -> None:
    """Say why a batch does not fit.

    Args:
        kind: Of the batch.
        planned: The plan with which it does not fit; none if it was measured.
    """
    shapes = in_words(kind[1]) if kind else "unknown"
    if planned is None:
        reason = "every block was run again, as in each first step with a batch of new shapes"
    else:
        least = written(planned.report.plan.peak)
        reason = (
            f"its activations need {least} at least, which was planned; largest blocks: "
            f"{largest(planned.table)}"
        )
    rank_zero_warn(
        f"a batch of {shapes} does not fit: {reason}. A smaller batch or a shorter sequence, "
        "smaller blocks (blocks=), a lower precision or an optimizer with less state need less"
    )


def in_words(shapes: Shapes) -> str:
    """Shapes as text."""
    return ", ".join("x".join(map(str, shape)) for shape in shapes) or "unknown"


def largest(table: Table | Microbatched, most: int = 3) -> str:
    """The blocks that hold most, as text."""
    found = sorted(table.blocks, key=lambda block: -block.saved)[:most]
    return ", ".join(f"{block.name} ({written(block.saved)})" for block in found)
