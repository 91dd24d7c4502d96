"""Memory that a device has left."""

from __future__ import annotations

import torch

from strategies.checkpointing.budget import SHARE, host_memory


def memory_left(device: torch.device) -> int | None:
    """Bytes that tensors can still take, or none if that is not known.

    Args:
        device: On which the model is.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch keeps for itself is free for tensors, too.
        own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(SHARE * (free + own))
    if device.type == "cpu":
        return host_memory()
    return None
