"""Callbacks and data for an existing Keras 3 `model.fit`, on every backend.

Example:
    >>> from keras_ext import LayerwiseLRDecay
    >>> LayerwiseLRDecay(decay=0.75)
    LayerwiseLRDecay(decay=0.75)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from keras_ext._shadow import require_ours

require_ours("strategies")

from strategies import __version__  # noqa: E402

if TYPE_CHECKING:
    from keras_ext.callbacks import (
        DynamicGradientCheckpointing,
        LayerwiseLRDecay,
        PredictiveEarlyStopping,
    )

__all__ = [
    "DynamicGradientCheckpointing",
    "LayerwiseLRDecay",
    "PredictiveEarlyStopping",
    "__version__",
]

# Keras and its backend load on first use, so that importing this package costs next to nothing.
_HOME = {
    "DynamicGradientCheckpointing": "keras_ext.callbacks",
    "LayerwiseLRDecay": "keras_ext.callbacks",
    "PredictiveEarlyStopping": "keras_ext.callbacks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("keras", "tensorflow", "jax", "torch"):
            raise
        raise ImportError(
            f"{__name__}.{name} needs Keras 3 and a backend: "
            "pip install 'lightning-keras-ext[tensorflow]', or [jax]",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
