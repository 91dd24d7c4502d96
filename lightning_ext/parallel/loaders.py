"""DataLoaders of ranks that work on the same copy of the model."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_ext import _compat


def alike(loader: Any, rank: int) -> Any:
    """Let workers draw the same random numbers on all ranks that see the same data.

    Args:
        loader: What the user has given.
        rank: Along the data axis.
    """
    seeded = int(os.environ.get("PL_SEED_WORKERS", "0"))
    if seeded and getattr(loader, "worker_init_fn", "none") is None:
        loader.worker_init_fn = partial(_compat.seed_worker, rank=rank)
    return loader


def shuffled_alike(loader: Any) -> Any:
    """Shuffle as Lightning does on several ranks: by seed and epoch, so that it also resumes.

    Where all ranks see all data Lightning puts in no sampler of its own, which would shuffle what
    the user wants in order.

    Args:
        loader: What the user has given.
    """
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return loader
    sampler = loader.sampler
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.generator is not None:
        return loader
    if sampler.num_samples != len(sampler.data_source):
        return loader
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    ours: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, 1, 0, shuffle=True, seed=seed
    )
    return _compat.with_sampler(loader, ours)
