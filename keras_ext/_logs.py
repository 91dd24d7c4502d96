"""Reading metrics out of the `logs` that Keras hands to callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np


def number(argument: str, name: str, logs: Mapping[str, Any]) -> float:
    """The value of a metric.

    Args:
        argument: The user's argument that gives its name.
        name: Name of the metric.
        logs: What Keras handed over.

    Raises:
        ValueError: It is not there.
        TypeError: It is not one number.

    Example:
        >>> number("monitor", "loss", {"loss": 0.5})
        0.5
    """
    if name not in logs:
        raise ValueError(
            f"{argument}={name!r} is not in the logs, which hold: {names(logs)}; pass one of "
            "these, or put the callback that computes it earlier in callbacks=[...]"
        )
    array = np.asarray(keras.ops.convert_to_numpy(logs[name]))
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise TypeError(
            f"{argument}={name!r} must be one number, got {logs[name]!r}; pass a metric that is one"
        )
    return float(array.item())


def names(logs: Mapping[str, Any]) -> str:
    """What there is to choose from."""
    return ", ".join(sorted(logs)) or "nothing"
