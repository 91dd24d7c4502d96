"""The ranks of a run and the process groups along the axes of its layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from strategies.parallel import Layout


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
    """

    layout: Layout
    rank: int
    device: torch.device
    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    tensor: DeviceMesh
    model: dist.ProcessGroup

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Mesh:
        """Make the groups; every rank has to call this."""
        rank = dist.get_rank()

        def group(*axes: str) -> dist.ProcessGroup:
            own, _ = dist.new_subgroups_by_enumeration([list(g) for g in layout.groups(*axes)])
            return own

        tensor = DeviceMesh.from_group(group("tensor"), device.type, mesh_dim_names=("tensor",))
        return cls(
            layout, rank, device, group("pipeline"), group("data"), tensor,
            group("pipeline", "tensor"),
        )  # fmt: skip

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
