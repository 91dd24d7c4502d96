"""Tensors in arguments and results, and the memory that they share."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_ext._torch import is_of_parameter, is_transforming, version_of

DEPTH = 3  # how far objects in batches are opened
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_open(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module))


def tensors_in(tree: Any, depth: int = 1) -> tuple[Tensor, ...]:
    """Tensors of a nested structure.

    Args:
        tree: Of what torch opens, and of objects such as dataclasses.
        depth: How far objects are opened that torch does not open. Default: 1, their attributes.
    """
    found: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth and _is_open(leaf):
            found += tensors_in(list(vars(leaf).values()), depth - 1)
    return tuple(found)


def fresh(leaf: Any) -> Any:
    """An object of a nested structure as nobody else has it, if it may hold tensors."""
    if isinstance(leaf, Tensor) or not tensors_in(leaf):
        return leaf
    return copy.copy(leaf)


def copied(tensor: Tensor) -> Tensor:
    """A copy of a tensor as it lies in memory, without its graph."""
    found = tensor.detach().clone()
    if tensor.layout is not torch.strided or found.stride() == tensor.stride():
        return found.requires_grad_(tensor.requires_grad)
    steps = tensor.stride()
    # What was expanded is copied once.
    sizes = [1 if step == 0 else size for size, step in zip(tensor.shape, steps, strict=True)]
    once = torch.empty_strided(sizes, steps, dtype=tensor.dtype, device=tensor.device)
    try:
        once.copy_(tensor.detach().as_strided(sizes, steps, tensor.storage_offset()))
    except RuntimeError:  # elements lie in one another, as `Tensor.unfold` lays them
        return found.requires_grad_(tensor.requires_grad)
    return once.as_strided(tensor.shape, steps).requires_grad_(tensor.requires_grad)


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal, bit for bit; what is not a number equals itself."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    found, expected = local(found.detach()), local(expected.detach())
    if found.layout is not torch.strided:
        found, expected = found.to_dense(), expected.to_dense()
    if torch.equal(found, expected):
        return True
    bits = _BITS.get(found.element_size())
    if bits is None or not (found.is_floating_point() or found.is_complex()):
        return False
    return torch.equal(
        found.resolve_conj().resolve_neg().view(bits),
        expected.resolve_conj().resolve_neg().view(bits),
    )


def first_of(value: Any) -> Tensor | None:
    """What goes on to the next layer: the tensor, or the first of several."""
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, Tensor) else None


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that may be divided between several."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """What a tensor keeps alive; none for sparse ones, those of `torch.func` and the like."""
    try:
        storage = local(tensor).untyped_storage()
        storage.data_ptr()
    except RuntimeError:
        return None
    return storage


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of what a tensor keeps alive, which views share."""
    storage = storage_of(tensor)
    return (-id(tensor), 0) if storage is None else (storage.data_ptr(), storage.nbytes())


def stays(tensor: Tensor) -> bool:
    """Whether a tensor that is saved is not worth to be dropped, or cannot be."""
    return is_transforming() or storage_of(tensor) is None or is_of_parameter(tensor)


def as_saved(tensor: Tensor) -> Tensor:
    """What is put into a graph for a tensor that stays."""
    # With its graph, an output that a node saves would keep that node, and itself, for ever.
    return tensor if is_transforming() else tensor.detach()


def owned_by(module: nn.Module) -> set[int]:
    """Addresses of parameters and buffers, which are there in any case."""
    held = [*module.parameters(), *module.buffers()]
    return {memory_of(t)[0] for t in held}


_T = TypeVar("_T")


class ByMemory(Generic[_T]):
    """Values for tensors; all views of one memory have the same, until it is freed."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[torch.UntypedStorage], _T]] = {}

    def get(self, tensor: Tensor) -> _T | None:
        """The value of a tensor, if it has one."""
        storage = storage_of(tensor)
        found = self._values.get(id(storage))
        # What was freed may have left its place, and so its id, to another.
        return found[1] if found is not None and found[0]() is storage else None

    def set(self, tensor: Tensor, value: _T, gone: Callable[[Any], None] | None = None) -> None:
        """Set the value of a tensor.

        Args:
            tensor: Any tensor.
            value: Its value.
            gone: Called when its memory is freed. Default: nothing is.
        """
        storage = storage_of(tensor)
        if storage is not None:
            self._values[id(storage)] = weakref.ref(storage, gone), value


@dataclass(frozen=True)
class Identity:
    """Tells whether a tensor is still the one that was seen, or a view of it.

    An address alone does not: memory that is freed is used again.

    Args:
        storage: Weak reference to what it keeps alive.
        version: How often it had been written to.
        dtype: Of its elements.
    """

    storage: weakref.ref[torch.UntypedStorage]
    version: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Identity:
        """Of a tensor as it is now."""
        return cls(weakref.ref(tensor.untyped_storage()), version_of(tensor), tensor.dtype)

    def shares(self, tensor: Tensor) -> bool:
        """Whether this tensor has the same memory and reads it in the same way."""
        same = self.storage() is storage_of(tensor) and self.dtype == tensor.dtype
        return same and not (tensor.is_conj() or tensor.is_neg())

    def holds(self, tensor: Tensor) -> bool:
        """Whether this tensor moreover has not been written to since."""
        return self.shares(tensor) and self.version == version_of(tensor)
