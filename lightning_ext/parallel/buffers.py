"""Buffers, such as running statistics, made alike before a model is evaluated or saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ext import _compat
from lightning_ext.parallel.faults import Faults, guarded
from lightning_ext.parallel.mesh import Mesh


class Buffers:
    """The buffers of a module that training changes, each on the ranks that run its layer.

    Over the data axis those of the first copy count. A layer outside the pipelined module is on all
    stages, but only some run it: what comes before the model's call runs on the first stage once
    per microbatch, what comes after it on the last alone. So the first stage that has changed a
    buffer has the right one.

    Args:
        root: The LightningModule, with what other stages hold on the meta device.
        stages: That hold each buffer, by name.
        mesh: The ranks.
        faults: Tells the other ranks what goes wrong on this one.
    """

    def __init__(
        self, root: nn.Module, stages: Mapping[str, tuple[int, ...]], mesh: Mesh, faults: Faults
    ) -> None:
        self.root, self.mesh, self.faults = root, mesh, faults
        metrics = tuple(f"{path}." for path, _ in _compat.metrics_of(root))
        names = [name for name, _ in root.named_buffers() if not name.startswith(metrics)]
        several = mesh.layout.pipeline > 1
        self.everywhere = [
            name for name in names if several and len(stages[name]) == mesh.layout.pipeline
        ]
        self.here = [name for name in names if mesh.stage in stages[name]]
        self._before: list[Tensor] = []
        self.remember()

    def remember(self) -> None:
        """Take what is there as what all stages have."""
        self._before = [x.detach().clone() for x in self._of(self.everywhere)]

    def _of(self, names: Sequence[str]) -> list[Tensor]:
        return [self.root.get_buffer(name) for name in names]

    @guarded
    @torch.no_grad()
    def share(self) -> None:
        """Make all stages and copies alike; every rank has to call this."""
        mesh = self.mesh
        if self.everywhere:
            buffers = self._of(self.everywhere)
            changed = [
                mesh.stage if not _same(now, old.to(now)) else mesh.layout.pipeline
                for now, old in zip(buffers, self._before, strict=True)
            ]
            sources = torch.tensor(changed, device=mesh.device)
            dist.all_reduce(sources, dist.ReduceOp.MIN, group=mesh.pipeline)
            first = sources.tolist()
            for stage in range(mesh.layout.pipeline):
                chosen = [b for b, source in zip(buffers, first, strict=True) if source == stage]
                _broadcast(chosen, mesh.stage_rank(stage), mesh.pipeline)
        if mesh.layout.data > 1:
            source = mesh.layout.rank(mesh.stage, 0, mesh.tensor_rank)
            _broadcast(self._of(self.here), source, mesh.data)
        self.remember()


def _same(now: Tensor, old: Tensor) -> bool:
    return torch.equal(now, old) or torch.allclose(now, old, rtol=0, atol=0, equal_nan=True)


def _broadcast(tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """One message for tensors of any types."""
    if not tensors:
        return
    packed = torch.cat([x.contiguous().reshape(-1).view(torch.uint8) for x in tensors])
    dist.broadcast(packed, src=source, group=group)
    sizes = [x.numel() * x.element_size() for x in tensors]
    for tensor, piece in zip(tensors, packed.split(sizes), strict=True):
        # A copy, as a piece may start anywhere, but numbers only at multiples of their size.
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
