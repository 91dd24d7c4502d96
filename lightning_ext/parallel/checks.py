"""Whether all ranks of a copy of the model see the same batch."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_ext.parallel.mesh import Mesh


def checksum(batch: Any) -> list[int]:
    """Two numbers that are the same for the same batch, and as good as never for another one."""
    words, total = "", 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            words += f"{tuple(leaf.shape)} {leaf.dtype};"
            if leaf.layout == torch.strided and leaf.numel():
                flat = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                total = zlib.crc32(flat.numpy().data, total)
        elif isinstance(leaf, (str, bytes, int, float)):
            words += f"{leaf!r};"
    return [zlib.crc32(words.encode()), total]


def same_batch(batch: Any, mesh: Mesh) -> None:
    """Compare the batch over the ranks of each copy of the model; every rank has to call this.

    Raises:
        ValueError: Some differ, on all ranks.
    """
    if mesh.layout.pipeline * mesh.layout.tensor == 1:
        return
    own = torch.tensor(checksum(batch), dtype=torch.int64, device=mesh.device)
    gathered = [torch.empty_like(own) for _ in range(mesh.layout.world_size)]
    dist.all_gather(gathered, own)
    found = [tuple(x.tolist()) for x in gathered]
    for ranks in mesh.layout.groups("pipeline", "tensor"):
        other = [rank for rank in ranks if found[rank] != found[ranks[0]]]
        if other:
            raise ValueError(
                f"rank {other[0]} was given another batch than rank {ranks[0]}, but both work on "
                "the same copy of the model: the DataLoader shuffles, or transforms, by random "
                "numbers that differ by rank; leave use_distributed_sampler=True, or pass a "
                "sampler with a fixed seed and **trainer.distributed_sampler_kwargs; for random "
                "transforms call seed_everything(seed, workers=True)"
            )
