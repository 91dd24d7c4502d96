"""Whether all ranks of a copy of the model see the same batch."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_ext import _compat
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


def check_supported(strategy: Any) -> None:
    """Refuse what the trainer asks of a strategy and does not get.

    Raises:
        ValueError: It asks for `precision="16-mixed"` or `sync_batchnorm=True`.
    """
    if getattr(strategy.precision_plugin, "scaler", None) is not None:
        raise ValueError("precision='16-mixed' is not supported; pass 'bf16-mixed'")
    if _compat.syncs_batchnorm(strategy):
        raise ValueError(
            "sync_batchnorm=True is not supported: batch norm takes the statistics of each "
            "microbatch; leave it False, or use norms that do not depend on the batch"
        )


def check_callbacks(trainer: Any, stages: int) -> None:
    """Refuse callbacks that need all weights, as no stage has them.

    Raises:
        ValueError: There is one, and there are several stages.
    """
    for name in ("StochasticWeightAveraging", "WeightAveraging", "BaseFinetuning"):
        for callback in _compat.callbacks_of(trainer) if stages > 1 else ():
            if _compat.is_lightning_class(callback, f"callbacks.{name}"):
                raise ValueError(
                    f"{type(callback).__name__} is not supported with pipeline={stages}, as no "
                    "rank has the whole model; leave it out, or pass pipeline=1"
                )


def share_model(module: nn.Module, mesh: Mesh) -> None:
    """Give every rank the parameters and buffers of the first; every rank has to call this.

    Raises:
        ValueError: Some ranks have built another model, on all ranks.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    built = "".join(f"{name} {tuple(t.shape)} {t.dtype};" for name, t in tensors)
    own = torch.tensor([zlib.crc32(built.encode())], dtype=torch.int64, device=mesh.device)
    gathered = [torch.empty_like(own) for _ in range(mesh.layout.world_size)]
    dist.all_gather(gathered, own)
    others = [rank for rank, found in enumerate(gathered) if found != gathered[0]]
    if others:
        raise ValueError(
            f"rank {others[0]} has built another model than rank 0: its parameters or buffers have "
            "other names, shapes or dtypes; sizes must not depend on the rank or on what it draws"
        )
    for _, tensor in tensors:
        whole = tensor.data.contiguous()  # other layouts in memory cannot be sent
        dist.broadcast(whole, src=0)
        if whole is not tensor.data:
            tensor.data.copy_(whole)


def same_batch(batch: Any, mesh: Mesh) -> None:
    """Compare the batch over the ranks of each copy of the model; every rank has to call this.

    Raises:
        ValueError: Some differ, on all ranks.
    """
    if mesh.layout.pipeline * mesh.layout.tensor == 1:
        return
    own = torch.tensor(checksum(batch), dtype=torch.int64, device=mesh.device)
    ranks = next(r for r in mesh.layout.groups("pipeline", "tensor") if mesh.rank in r)
    gathered = [torch.empty_like(own) for _ in ranks]
    # Only these: another copy may have no batch left.
    dist.all_gather(gathered, own, group=mesh.model)
    found = {rank: tuple(x.tolist()) for rank, x in zip(ranks, gathered, strict=True)}
    other = [rank for rank in ranks if found[rank] != found[ranks[0]]]
    if other:
        raise ValueError(
            f"rank {other[0]} was given another batch than rank {ranks[0]}, but both work on "
            "the same copy of the model: the DataLoader shuffles, or transforms, by random "
            "numbers that differ by rank; leave use_distributed_sampler=True, or pass a "
            "sampler with a fixed seed and **trainer.distributed_sampler_kwargs; for random "
            "transforms call seed_everything(seed, workers=True)"
        )
