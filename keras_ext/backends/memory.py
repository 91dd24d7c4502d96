"""Memory that the device of a model has left."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras

# Of what is free: allocators need room to move, and other processes take some.
_SHARE = 0.9


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
        return _host()
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    # What torch keeps for itself is free for tensors, too.
    own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_SHARE * (free + own))


def _tensorflow(model: keras.Model) -> int | None:
    config: Any = sys.modules["tensorflow"].config
    # It takes all memory of an accelerator at once, and does not say how much of it is in use.
    others = [d for d in config.list_logical_devices() if d.device_type != "CPU"]
    return None if others else _host()


def _jax(model: keras.Model) -> int | None:
    device = sys.modules["jax"].devices()[0]
    if device.platform == "cpu":
        return _host()
    stats = device.memory_stats() or {}
    if not {"bytes_limit", "bytes_in_use"} <= set(stats):
        return None
    return int(_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))


def _host(path: str = "/proc/meminfo") -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    found = sizes.get("MemAvailable", "").split()
    return int(_SHARE * 1024 * int(found[0])) if found else None
