"""Arguments that the callbacks of both frameworks have and the rule does not."""

from __future__ import annotations

from typing import Any

_NAMES = ("monitor", "train_monitor")
_FLAGS = ("wait_for_schedule", "restore_best", "log_forecast", "verbose")


def check_arguments(callback: Any) -> None:
    """Raise an error that says what to pass instead, should an argument be of no use.

    Args:
        callback: An object with the attributes `monitor`, `train_monitor`, `start_from_epoch`,
            `wait_for_schedule`, `restore_best`, `log_forecast` and `verbose`.

    Raises:
        TypeError: One of them has the wrong type.
        ValueError: `start_from_epoch` is negative.
    """
    for name in _NAMES:
        value = getattr(callback, name)
        optional = name == "train_monitor" and value is None
        if not optional and not (isinstance(value, str) and value):
            raise TypeError(
                f"{name} must be the name of a metric, such as 'val_loss', got {value!r}"
            )
    for name in _FLAGS:
        if not isinstance(value := getattr(callback, name), bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    start = callback.start_from_epoch
    if isinstance(start, bool) or not isinstance(start, int):
        raise TypeError(f"start_from_epoch must be a whole number of epochs, got {start!r}")
    if start < 0:
        raise ValueError(f"start_from_epoch must be 0 or more, got {start}; pass 0 not to wait")
