"""Tensors and small values between ranks, where shapes are not known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Meta = tuple[tuple[int, ...], torch.dtype, bool]


def meta_of(tensors: tuple[Tensor, ...]) -> list[Meta]:
    """Shape, type and whether a gradient flows, of each."""
    return [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]


def send(tensors: tuple[Tensor, ...], to: int, group: dist.ProcessGroup) -> None:
    """Send tensors with their shapes to a rank, numbered among all."""
    dist.send_object_list([meta_of(tensors)], dst=to, group=group)
    for tensor in tensors:
        dist.send(tensor.detach().contiguous(), dst=to, group=group)


def receive(source: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, ...]:
    """Receive what `send` sends."""
    metas: list[Any] = [None]
    dist.recv_object_list(metas, src=source, group=group)
    received = []
    for shape, dtype, wants in metas[0]:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, src=source, group=group)
        received.append(tensor.requires_grad_(wants))
    return tuple(received)


def share(value: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """A value of one rank, numbered among all, on every rank of a group (or of all)."""
    if dist.get_world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def share_output(output: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """The output of a model, of any nesting, on every rank of a group."""
    if dist.get_world_size(group) == 1:
        return output
    own = iter([x.detach() for x in tree_leaves(output) if isinstance(x, Tensor)])
    slots = tree_map_only(Tensor, lambda t: _Slot(tuple(t.shape), t.dtype), output)

    def fill(slot: _Slot) -> Tensor:
        here = dist.get_rank() == source
        empty = torch.empty(slot.shape, dtype=slot.dtype, device=device)
        tensor = next(own).to(device).contiguous() if here else empty
        dist.broadcast(tensor, src=source, group=group)
        return tensor

    return tree_map_only(_Slot, fill, share(slots, source, group))


_REDUCE = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def reduced(tensor: Tensor, group: dist.ProcessGroup, how: Any) -> Tensor:
    """A tensor of each rank of a group, as one.

    Args:
        tensor: Of this rank.
        group: The ranks.
        how: `"mean"`, `"sum"`, `"max"`, `"min"`, `"product"`, or torch's `ReduceOp` of that name.

    Raises:
        ValueError: There is no such way.
    """
    name = str(how).rpartition(".")[2].lower()
    if name not in _REDUCE:
        raise ValueError(f"reduce_op={how!r} must be one of {', '.join(_REDUCE)}")
    total = tensor.clone() if tensor.is_floating_point() else tensor.double()
    dist.all_reduce(total, op=_REDUCE[name], group=group)
    if name in ("mean", "avg"):
        return total / dist.get_world_size(group)
    return total.to(tensor.dtype)
