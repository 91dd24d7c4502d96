"""Memory that the device of a model has left."""

from __future__ import annotations

import sys
from typing import Any

import keras

from strategies.checkpointing.budget import SHARE, host_memory


def memory_left(model: keras.Model) -> int | None:
    """Bytes that tensors can still take, or none if that is not known.

    Args:
        model: In training, with its variables on the device.
    """
    return {"torch": _torch, "tensorflow": _tensorflow, "jax": _jax}[keras.backend.backend()](model)


def _torch(model: keras.Model) -> int | None:
    torch: Any = sys.modules["torch"]
    device = next((variable.value.device for variable in model.variables), None)
    if device is None or device.type == "cpu":
        return host_memory()
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    # What torch keeps for itself is free for tensors, too.
    own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(SHARE * (free + own))


def _tensorflow(model: keras.Model) -> int | None:
    config: Any = sys.modules["tensorflow"].config
    # It takes all memory of an accelerator at once, and does not say how much of it is in use.
    others = [d for d in config.list_logical_devices() if d.device_type != "CPU"]
    return None if others else host_memory()


def _jax(model: keras.Model) -> int | None:
    device = sys.modules["jax"].devices()[0]
    if device.platform == "cpu":
        return host_memory()
    stats = device.memory_stats() or {}
    if not {"bytes_limit", "bytes_in_use"} <= set(stats):
        return None
    return int(SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
