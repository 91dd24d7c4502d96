"""What ranks agree on that hold pieces of the same tensors, and wait for each other in blocks."""

from __future__ import annotations

import sys
import zlib
from typing import Any

import torch
import torch.distributed as dist

from lightning_ext._compat import is_lightning_class


class Agreement:
    """Decisions of a group of ranks: a block that one of them runs again, all have to.

    Args:
        group: Of processes. Default: None, this rank decides alone.
        device: For collectives. Default: the CPU.
    """

    def __init__(self, group: Any = None, device: torch.device | None = None) -> None:
        self.group, self.device = group, device or torch.device("cpu")

    @classmethod
    def of(cls, strategy: Any) -> Agreement:
        """Of the ranks that hold the pieces of the same tensors.

        Args:
            strategy: Of the trainer.
        """
        loaded = sys.modules.get("lightning_ext.strategies")
        if loaded is not None and isinstance(strategy, loaded.ThreeDParallelStrategy):
            if strategy.mesh.layout.tensor > 1:
                return cls(strategy.mesh.tensor.get_group(), strategy.mesh.device)
            return cls()
        if is_lightning_class(strategy, "strategies.ModelParallelStrategy"):
            mesh = strategy.device_mesh["tensor_parallel"]
            if mesh.size() > 1:
                return cls(mesh.get_group(), strategy.root_device)
        return cls()

    def least(self, value: float) -> float:
        """The least of the values of all ranks."""
        if self.group is None:
            return value
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return float(found)

    def all(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        return bool(self.least(float(yes)))

    def same(self, text: str) -> bool:
        """Whether all ranks have the same text."""
        own = float(zlib.crc32(text.encode()))
        least, most = self.least(own), -self.least(-own)
        return least == most
