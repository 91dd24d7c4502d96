"""Modules whose insides run on split tensors while their outside sees whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map_only

_SPLIT = (torch.split, Tensor.split, torch.chunk, Tensor.chunk)
# What DTensor does wrongly (statistics that are written to), in minutes (attention whose heads are
# not split, which it takes apart), or not at all in the backward pass.
_WHOLE = (
    F.prelu, F.scaled_dot_product_attention, F.multi_head_attention_forward,
    F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm,
)  # fmt: skip
_VIEW = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten)


class Region(TorchFunctionMode):
    """Global semantics for code that was written for whole tensors.

    Whole tensors that meet split ones are taken as replicated. What DTensor itself would gather,
    because it knows nothing of heads and fused layers, is computed on the pieces instead.

    Args:
        mesh: The tensor axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not tree_any(lambda x: isinstance(x, DTensor), (args, kwargs)):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            done = _attention(func, args, kwargs)
            if done is not None:
                return done
        if func in _WHOLE:
            return self.on_whole(func, args, kwargs)
        first = args[0] if args else None
        sections = _sections_of(first)
        if sections > 1 and isinstance(first, DTensor):
            done = _by_section(func, first, sections, args[1:], kwargs)
            if done is not None:
                return done
            if not _asks(func):
                args = (in_order(first, sections), *args[1:])
        split = tree_map_only(Tensor, self.whole, (args, kwargs))
        try:
            return tree_map_only(DTensor, _summed, func(*split[0], **split[1]))
        except NotImplementedError:  # DTensor does not know it
            if writes(func, kwargs):
                raise  # to a copy, if it were run on whole tensors
            return self.on_whole(func, args, kwargs)

    def on_whole(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a function makes of whole tensors, the same on all ranks."""
        args, kwargs = tree_map_only(DTensor, gathered, (args, kwargs))
        return tree_map_only(Tensor, self.whole, func(*args, **kwargs))

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor that is the same on all ranks, as DTensor."""
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)


def _summed(tensor: DTensor) -> DTensor:
    """Add up what each rank has a part of, as few operations know what to do with parts."""
    if tensor.placements[0].is_partial():
        return tensor.redistribute(placements=[Replicate()])
    return tensor


def gathered(tensor: DTensor) -> Tensor:
    """The whole of a tensor on every rank."""
    if (sections := _sections_of(tensor)) > 1:
        tensor = in_order(tensor, sections)
    return tensor.redistribute(placements=[Replicate()]).to_local()


def set_sections(tensor: DTensor, sections: int) -> None:
    """Note that the last dim consists of so many blocks, each of which is split by itself."""
    tensor.sections = sections  # type: ignore[attr-defined]


def _sections_of(tensor: Any) -> int:
    return int(getattr(tensor, "sections", 1)) if isinstance(tensor, DTensor) else 1


def writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function writes to what it is given."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or kwargs.get("out") is not None


def _asks(func: Callable[..., Any]) -> bool:
    """Whether a function only asks for the shape or another property of a tensor."""
    return func in (Tensor.size, Tensor.dim) or getattr(func, "__name__", "") == "__get__"


def _piece(local: Tensor, like: DTensor, dim: int) -> DTensor:
    return DTensor.from_local(local, like.device_mesh, [Shard(dim % local.ndim)], run_check=False)


def _attention(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor | None:
    """Attention of the heads that this rank has."""
    names = ("query", "key", "value", "attn_mask")
    given = dict(zip(names, args, strict=False)) | kwargs
    heads = [given[name] for name in names[:3]]
    mask = given.get("attn_mask")
    if not all(isinstance(x, DTensor) and x.ndim >= 3 for x in heads):
        return None
    dim = heads[0].ndim - 3
    if not all(x.placements[0].is_shard(dim) for x in heads):
        return None
    if mask is not None:
        given["attn_mask"] = _mask_of_heads(mask, heads[0].device_mesh)
    local = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in given.items()}
    rest = args[len(names) :]
    positional = [local.pop(name) for name in names[:3]]
    if rest or len(args) > 3:
        positional.append(local.pop("attn_mask"))
    return _piece(func(*positional, *rest, **local), heads[0], dim)


def _mask_of_heads(mask: Tensor, mesh: DeviceMesh) -> Tensor:
    """The part of a mask or bias for this rank's heads; the gradient is that of all heads."""
    if not isinstance(mask, DTensor):
        mask = DTensor.from_local(mask, mesh, [Replicate()], run_check=False)
    if mask.ndim >= 3 and mask.shape[-3] > 1:
        return mask.redistribute(placements=[Shard(mask.ndim - 3)]).to_local()
    # All heads share it, so that each rank finds a part of its gradient.
    return mask.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _by_section(
    func: Callable[..., Any], first: DTensor, sections: int, rest: tuple[Any, ...], kwargs: Any
) -> Any:
    """Take the output of a fused layer apart without leaving the pieces."""
    dim = first.ndim - 1
    width = first.shape[dim] // sections
    if func in _SPLIT:
        size = rest[0] if rest else kwargs.get("split_size_or_sections", kwargs.get("chunks"))
        along = rest[1] if len(rest) > 1 else kwargs.get("dim", 0)
        counts = (sections, width, [width] * sections)
        fits = (
            size == counts[0]
            if func in _SPLIT[2:]
            else size in counts[1:] or (isinstance(size, tuple) and list(size) == counts[2])
        )
        if along % first.ndim == dim and fits:
            return tuple(_piece(x, first, dim) for x in first.to_local().chunk(sections, dim))
    if func in _VIEW[:3]:
        shape = rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest
        return _unfold(first, sections, tuple(shape))
    if func in _VIEW[3:] and rest and rest[0] % first.ndim == dim:
        return _unfold(first, sections, (*first.shape[:-1], *rest[1]))
    return None


def _unfold(first: DTensor, sections: int, shape: tuple[int, ...]) -> DTensor | None:
    """View `(..., sections * heads * width)` as `(..., sections, heads, width)`."""
    ranks = first.device_mesh.size()
    lead = first.ndim - 1
    if len(shape) != lead + 3 or shape[lead] != sections:
        return None
    heads = shape[lead + 1]
    if heads == -1:
        heads = first.shape[-1] // (sections * shape[lead + 2])
    if heads % ranks:
        return None
    local = first.to_local()
    return _piece(local.reshape(*local.shape[:-1], sections, heads // ranks, -1), first, lead + 1)


def in_order(tensor: DTensor, sections: int, dim: int = -1) -> DTensor:
    """The whole of a tensor that is split by section, in the order in which it was written."""
    whole = tensor.redistribute(placements=[Replicate()]).to_local()
    ranks = tensor.device_mesh.size()
    ordered = torch.stack(whole.chunk(ranks, dim)).unflatten(dim, (sections, -1))
    # (rank, ..., section, width) -> (..., section, rank, width)
    ordered = ordered.movedim(0, dim - 1).flatten(dim - 2, dim)
    return DTensor.from_local(ordered, tensor.device_mesh, [Replicate()], run_check=False)


def make_region(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let a module run on split tensors; what goes in and what comes out is whole.

    Args:
        module: Whose `forward` is wrapped.
        mesh: The tensor axis.
    """
    mode, forward = Region(mesh), module.forward

    def enter(tensor: Tensor) -> Tensor:
        return mode.whole(tensor) if tensor.is_floating_point() else tensor

    def split_forward(*args: Any, **kwargs: Any) -> Any:
        # Inside a surrounding region tensors are split already and stay so.
        inner = tree_any(lambda x: isinstance(x, DTensor), (args, kwargs))
        if inner:
            return forward(*args, **kwargs)
        with mode:
            args, kwargs = tree_map_only(Tensor, enter, (args, kwargs))
            return tree_map_only(DTensor, gathered, forward(*args, **kwargs))

    module.forward = split_forward
