"""A batch cut into microbatches, and random numbers that every stage draws alike."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def batch_size(batch: Any) -> int:
    """Items of a batch: the size of the first dim that most of its tensors have."""
    sizes = [len(t) for t in tree_leaves(batch) if isinstance(t, Tensor) and t.ndim]
    if sizes:
        return Counter(sizes).most_common(1)[0][0]  # of equally many, the one that comes first
    raise ValueError(
        f"the batch, a {type(batch).__name__}, has no tensor with a batch dim; let the DataLoader "
        "return tensors, or lists, tuples and dicts of them"
    )


def chunks(batch: Any, count: int) -> list[Any]:
    """Equal parts of a batch: of tensors, and lists of other things, that have its size.

    What does not have it is in all parts.
    """
    size = batch_size(batch)
    each = size // count

    def listed(value: Any) -> bool:
        plain = isinstance(value, list) and len(value) == size
        return plain and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))

    def part(i: int) -> Any:
        def cut(value: Any) -> Any:
            whole = isinstance(value, Tensor) and value.ndim and len(value) == size
            return value[i * each : (i + 1) * each] if whole or listed(value) else value

        return tree_map(cut, batch, is_leaf=listed)

    return [batch] if count == 1 else [part(i) for i in range(count)]


def copied(batch: Any) -> Any:
    """A batch that can be written to without a trace."""
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, batch)


def count_for(size: int, wanted: int | None, stages: int) -> int:
    """Number of microbatches: the largest that divides the batch and is not more than wanted."""
    if size < 1:
        raise ValueError("the batch is empty; leave it out of the DataLoader (drop_last=True)")
    most = min(size, wanted or (1 if stages == 1 else 4 * stages))
    return next(n for n in range(most, 0, -1) if size % n == 0)


def key_of(batch: Any) -> tuple[Any, ...]:
    """What decides the shapes of the activations."""
    return tuple((tuple(x.shape), x.dtype) for x in tree_leaves(batch) if isinstance(x, Tensor))


@contextmanager
def kept() -> Iterator[None]:
    """Put the random states of torch, numpy and Python back afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def mixed(*numbers: int) -> int:
    """One number of 32 bits that depends on all of these."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def seed(base: int, index: int = 0) -> None:
    """Seed torch, numpy and Python.

    Args:
        base: A number of 32 bits.
        index: Another, small one: no two give the same seed with the same base.
    """
    value = (base + 0x9E3779B1 * index) % 2**32
    # torch.manual_seed looks for all kinds of devices, which takes a hundred times as long.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    np.random.seed(value)
    random.seed(value)
