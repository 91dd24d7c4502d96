"""The ranks of a run and the process groups along the axes of its layout."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from strategies.parallel import Layout


def connect(
    environment: Any, backend: str | None, device: torch.device, timeout: timedelta
) -> None:
    """Connect the processes, if they are not yet.

    Args:
        environment: Cluster environment of Lightning, which knows the ranks.
        backend: Of the process group; None for that of the device.
        device: Of this process.
        timeout: Of collectives.
    """
    if dist.is_initialized():
        return
    os.environ.setdefault("MASTER_ADDR", environment.main_address)
    os.environ.setdefault("MASTER_PORT", str(environment.main_port))
    dist.init_process_group(
        backend or dist.get_default_backend_for_device(device.type),
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=timeout,
    )


@dataclass(frozen=True)
class Mesh:
    """Where this rank is, and its group along each axis.

    Args:
        layout: Sizes of the axes.
        rank: Of this process, in all.
        device: Of this process.
        pipeline: Ranks that hold the other stages of this one's copy of the model.
        data: Ranks that hold the same pieces for other data.
        tensor: Ranks that hold the other pieces of the same tensors, as a mesh for DTensor.
        model: Ranks that together hold the copy of the model, and see the same data.
        timeout: Of collectives.
    """

    layout: Layout
    rank: int
    device: torch.device
    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    tensor: DeviceMesh
    model: dist.ProcessGroup
    timeout: timedelta

    @classmethod
    def of(cls, layout: Layout, device: torch.device, timeout: timedelta) -> Mesh:
        """Make the groups; every rank has to call this."""
        rank = dist.get_rank()

        def group(*axes: str) -> dist.ProcessGroup:
            return _group(layout.groups(*axes), timeout)

        tensor = DeviceMesh.from_group(group("tensor"), device.type, mesh_dim_names=("tensor",))
        return cls(
            layout, rank, device, group("pipeline"), group("data"), tensor,
            group("pipeline", "tensor"), timeout,
        )  # fmt: skip

    def group(self, ranks: Iterable[Iterable[int]]) -> dist.ProcessGroup:
        """The group of this rank among some without overlap; every rank has to call this."""
        return _group(ranks, self.timeout)

    @property
    def stage(self) -> int:
        """Index of the stage that this rank holds."""
        return self.layout.coordinates(self.rank).pipeline

    @property
    def data_rank(self) -> int:
        """Index of the data that this rank sees."""
        return self.layout.coordinates(self.rank).data

    @property
    def tensor_rank(self) -> int:
        """Index of the piece that this rank holds of each split tensor."""
        return self.layout.coordinates(self.rank).tensor

    @property
    def first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.stage == self.layout.pipeline - 1

    @property
    def last_in_model(self) -> int:
        """The rank, in all, that speaks for the last stage of this copy of the model."""
        return self.layout.rank(self.layout.pipeline - 1, self.data_rank, 0)

    def stage_rank(self, stage: int) -> int:
        """The rank, in all, of a stage with the same data and piece as this one."""
        return self.layout.rank(stage, self.data_rank, self.tensor_rank)


def _group(ranks: Iterable[Iterable[int]], timeout: timedelta) -> dist.ProcessGroup:
    # Without a timeout a group takes that of its backend, not that of the group of all.
    own, _ = dist.new_subgroups_by_enumeration([list(g) for g in ranks], timeout=timeout)
    return own
