"""Callbacks, strategies and data for an existing PyTorch Lightning `Trainer`.

Example:
    >>> from lightning_ext import LayerwiseLRDecay
    >>> LayerwiseLRDecay(decay=0.75)
    LayerwiseLRDecay(decay=0.75)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_ext._shadow import require_ours

require_ours("strategies")

from strategies import __version__  # noqa: E402

if TYPE_CHECKING:
    from lightning_ext.callbacks import (
        DynamicGradientCheckpointing,
        LayerwiseLRDecay,
        PredictiveEarlyStopping,
    )
    from lightning_ext.parallel import PipelinePart
    from lightning_ext.strategies import ThreeDParallelStrategy

__all__ = [
    "DynamicGradientCheckpointing",
    "LayerwiseLRDecay",
    "PipelinePart",
    "PredictiveEarlyStopping",
    "ThreeDParallelStrategy",
    "__version__",
]

# Torch and Lightning load on first use, so that importing this package costs next to nothing.
_HOME = dict.fromkeys(
    ["DynamicGradientCheckpointing", "LayerwiseLRDecay", "PredictiveEarlyStopping"],
    "lightning_ext.callbacks",
)
_HOME |= {
    "PipelinePart": "lightning_ext.parallel",
    "ThreeDParallelStrategy": "lightning_ext.strategies",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "lightning", "pytorch_lightning"):
            raise
        raise ImportError(
            f"{__name__}.{name} needs PyTorch and Lightning: "
            "pip install 'lightning-keras-ext[lightning]'",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
