"""When a metric was evaluated in a fit, and how many evaluations are still to come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median_low
from typing import Any


@dataclass
class Evaluations:
    """The evaluations of a fit so far, by epoch; epochs count from 0.

    Args:
        first: Epoch with which the record begins.
        epochs: Epochs that ended with an evaluation.
        rates: Learning rate at each of them, NaN where unknown.
        bests: Those among `epochs` that were the best until then.
        held: What held a stop at each of them, None where nothing did.
    """

    first: int = 0
    epochs: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    bests: list[int] = field(default_factory=list)
    held: list[str | None] = field(default_factory=list)

    @property
    def every(self) -> int:
        """Epochs from one evaluation to the next.

        >>> Evaluations(epochs=[1, 3, 5]).every
        2
        """
        gaps = [later - earlier for earlier, later in pairwise(self.epochs)]
        return max(1, median_low(gaps)) if gaps else self.epochs[-1] + 1 - self.first

    def planned(self, epochs: int | None) -> int | None:
        """Evaluations in all, if training ends at an epoch; None where that is unknown.

        >>> Evaluations(epochs=[1, 3, 5]).planned(11)
        5
        """
        if epochs is None:
            return None
        left = max(0, epochs - 1 - self.epochs[-1])
        return len(self.epochs) + left // self.every

    def cut(self, epoch: int) -> int:
        """Forget what came at an epoch or later, and return how many evaluations are left."""
        kept = sum(e < epoch for e in self.epochs)
        del self.epochs[kept:], self.rates[kept:], self.held[kept:]
        self.bests = [e for e in self.bests if e < epoch]
        return kept

    def move(self, by: int) -> None:
        """Count the epochs from another one."""
        self.first += by
        self.epochs = [e + by for e in self.epochs]
        self.bests = [e + by for e in self.bests]

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return asdict(self) | {"rates": without_nan(self.rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.first = int(state["first"])
        self.epochs, self.rates = list(state["epochs"]), with_nan(state["rates"])
        self.bests, self.held = list(state["bests"]), list(state["held"])


def without_nan(values: Iterable[float]) -> list[float | None]:
    """None in place of what JSON cannot hold, and what equals nothing, not even itself."""
    return [value if math.isfinite(value) else None for value in values]


def with_nan(values: Iterable[float | None]) -> list[float]:
    """The reverse, NaN in place of None."""
    return [math.nan if value is None else float(value) for value in values]
