"""The decision log: what a callback decided, when and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, overload


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of one callback.

    Args:
        time: When it was taken, in seconds since the Unix epoch.
        step: Optimizer steps done at that moment.
        callback: Class name of the callback that decided.
        action: What was done, in a few words (`"set rates"`, `"stop"`).
        reason: Why, in one sentence for a person.
        numbers: The figures behind the reason. Default: none.

    Example:
        >>> Decision(0.0, 10, "LayerwiseLRDecay", "set rates", "3 levels", {"levels": 3.0}).step
        10
    """

    time: float
    step: int
    callback: str
    action: str
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class DecisionLog(Sequence[Decision]):
    """The decisions of one callback, in order; a read-only sequence that can be saved.

    Callbacks expose theirs as `decisions_`.

    Args:
        callback: Name under which decisions are recorded.
        clock: Returns seconds since the Unix epoch. Default: `time.time`.

    Example:
        >>> log = DecisionLog("LayerwiseLRDecay", clock=lambda: 0.0)
        >>> log.record(0, "set rates", "3 levels", levels=3).reason
        '3 levels'
        >>> len(log)
        1
    """

    def __init__(self, callback: str, clock: Callable[[], float] = time.time) -> None:
        self.callback = callback
        self._clock = clock
        self._decisions: list[Decision] = []

    def record(self, step: int, action: str, reason: str, **numbers: float) -> Decision:
        """Append a decision and return it.

        Args:
            step: Optimizer steps done so far.
            action: What was done, in a few words.
            reason: Why, in one sentence.
            **numbers: The figures behind the reason.
        """
        plain = {name: float(value) for name, value in numbers.items()}
        now = float(self._clock())
        decision = Decision(now, int(step), self.callback, action, reason, plain)
        self._decisions.append(decision)
        return decision

    def clear(self) -> None:
        """Forget all decisions, as a fresh run does."""
        self._decisions.clear()

    def state_dict(self) -> list[dict[str, Any]]:
        """The log as plain values, for a checkpoint or a JSON file."""
        return [asdict(decision) for decision in self._decisions]

    def load_state_dict(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Replace the log by what `state_dict` returned."""
        self._decisions = [
            Decision(**{**entry, "numbers": dict(entry["numbers"])}) for entry in state
        ]

    @overload
    def __getitem__(self, index: int) -> Decision: ...
    @overload
    def __getitem__(self, index: slice) -> list[Decision]: ...
    def __getitem__(self, index: int | slice) -> Decision | list[Decision]:
        return self._decisions[index]

    def __len__(self) -> int:
        return len(self._decisions)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._decisions)

    def __repr__(self) -> str:
        return f"DecisionLog({self.callback!r}, {len(self)} decisions)"
