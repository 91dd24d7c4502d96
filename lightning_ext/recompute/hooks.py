"""Hooks on modules that copies of the modules, and files, do not take along."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class Hook:
    """Calls a function; a copy of it, or what comes out of a file, does nothing.

    Args:
        function: Gets what torch gives to the hook.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        return self.function(*args)

    def __reduce__(self) -> Any:
        # Does nothing with any arguments, and is there where this package is not.
        return getattr, (nullcontext(), "__exit__")
