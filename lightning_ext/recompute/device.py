"""Memory that a device has left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

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


def left_for(trainer: Any, parameters: Iterable[nn.Parameter]) -> int | None:
    """Bytes that activations can take on the device of a trainer, or none if that is not known.

    Args:
        trainer: The running trainer.
        parameters: Of its module.
    """
    left = memory_left(trainer.strategy.root_device)
    if left is None:
        return None
    # Gradients are there now, or will be; optimizers may not have made their state yet.
    trained = [p for p in parameters if p.requires_grad]
    missing = sum(p.numel() * p.element_size() for p in trained if p.grad is None)
    if not any(optimizer.state for optimizer in trainer.optimizers):
        missing += 2 * sum(p.numel() * p.element_size() for p in trained)
    return max(left - missing, 0)
