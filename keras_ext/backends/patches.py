"""Attributes set on one instance over those of its class, and taken off again."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """What was set on which instance, so that it can be undone.

    Instance attributes never reach a saved file, so a model or an optimizer that is saved with
    patches on it loads without them, and without this package.

    Example:
        >>> class Clock:
        ...     def tick(self): return "tick"
        >>> clock, patches = Clock(), Patches()
        >>> patches.set(clock, "tick", lambda: "tock")
        >>> clock.tick()
        'tock'
        >>> patches.undo()
        >>> clock.tick()
        'tick'
    """

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[Any, Any]] = {}

    def __bool__(self) -> bool:
        """Whether anything is set."""
        return bool(self._before)

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute; setting it again keeps the first value for `undo`."""
        self._before.setdefault((id(target), name), (target, vars(target).get(name, _ABSENT)))
        setattr(target, name, value)

    def undo(self) -> None:
        """Put every attribute back as it was before it was first set."""
        for (_, name), (target, before) in reversed(self._before.items()):
            if before is not _ABSENT:
                setattr(target, name, before)
            elif name in vars(target):
                delattr(target, name)
        self._before.clear()
