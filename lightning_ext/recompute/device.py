"""Memory that a device has left."""

from __future__ import annotations

from pathlib import Path

import torch

# Of what is free: allocators need room to move, and other processes take some.
_SHARE = 0.9


def memory_left(device: torch.device) -> int | None:
    """Bytes that tensors can still take, or none if that is not known.

    Args:
        device: On which the model is.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch keeps for itself is free for tensors, too.
        own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(_SHARE * (free + own))
    if device.type == "cpu":
        return _host()
    return None


def _host(path: str = "/proc/meminfo") -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    found = sizes.get("MemAvailable", "").split()
    return int(_SHARE * 1024 * int(found[0])) if found else None
