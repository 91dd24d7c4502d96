"""What a training step returns and logs, from the last stage to all ranks of a copy."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ext.parallel import transport
from lightning_ext.parallel.logs import Logged
from lightning_ext.parallel.mesh import Mesh

_EXACT = 2**53  # whole numbers up to here are exact in double precision


@dataclass(frozen=True)
class Returned:
    """The result of a training step.

    Args:
        loss: Mean over microbatches.
        logged: What is logged.
        extras: What `training_step` returns beside the loss.
        as_dict: Whether it returns a dict.
        stop: Whether it has asked the trainer to stop.
    """

    loss: Tensor
    logged: list[Logged]
    extras: dict[str, Any]
    as_dict: bool
    stop: Tensor

    @property
    def values(self) -> list[Tensor]:
        """All tensors, in order."""
        logged = [x.value for x in self.logged if x.value is not None]
        return [
            self.loss,
            self.stop,
            *logged,
            *(x for x in self.extras.values() if isinstance(x, Tensor)),
        ]

    def with_values(self, values: Sequence[Tensor]) -> Returned:
        """The same with other tensors."""
        loss, stop, *rest = values
        left = iter(rest)
        logged = [x if x.value is None else replace(x, value=next(left)) for x in self.logged]
        extras = {k: next(left) if isinstance(v, Tensor) else v for k, v in self.extras.items()}
        return Returned(loss, logged, extras, self.as_dict, stop)


class Sharing:
    """Sends results by one small tensor while names and options stay as they were.

    The tensor starts with a flag, so that all ranks know whether the whole result follows as an
    object: the first time, when something else is logged than before, and where a result has more
    than single numbers.

    Args:
        mesh: The ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.form: Any = None
        self.last: Returned | None = None
        self.objects = 0

    def share(self, here: Returned | None) -> Returned:
        """The result on all ranks of a copy.

        Args:
            here: The result, on the last stage.
        """
        mesh = self.mesh
        if here is not None:
            here = _over_data(here, mesh)
        if mesh.layout.pipeline * mesh.layout.tensor == 1:
            assert here is not None
            return here
        source = mesh.last_in_model
        count = 0 if self.last is None else len(self.last.values)
        box = torch.zeros(1 + count, dtype=torch.float64, device=mesh.device)
        if mesh.rank == source:
            assert here is not None
            if self.last is not None and _form(here) == self.form and _exact(here):
                box[0] = 1
                box[1:] = torch.stack([x.double().to(mesh.device) for x in here.values])
        dist.broadcast(box, src=source, group=mesh.model)
        if box[0]:
            assert self.last is not None
            known = zip(self.last.values, box[1:].unbind(), strict=True)
            return self.last.with_values([value.to(old.dtype) for old, value in known])
        return self._as_object(here, source)

    def _as_object(self, here: Returned | None, source: int) -> Returned:
        self.objects += 1
        sent = here.with_values([x.cpu() for x in here.values]) if here is not None else None
        found: Returned = transport.share(sent, source, self.mesh.model)
        self.form = _form(found)
        self.last = None if self.form is None else found
        return found.with_values([x.to(self.mesh.device) for x in found.values])


def _form(result: Returned) -> Any:
    """Everything but the values, or None if that cannot be compared."""
    if any(x.ndim or x.is_complex() for x in result.values):
        return None
    plain = (Tensor, int, float, str, bool, type(None))
    if not all(isinstance(x, plain) for x in result.extras.values()):
        return None
    return (
        [(x.name, x.options, x.metric, x.value is None) for x in result.logged],
        {k: None if isinstance(x, Tensor) else (type(x), x) for k, x in result.extras.items()},
        result.as_dict,
        [x.dtype for x in result.values],
    )


def _exact(result: Returned) -> bool:
    wide = [x for x in result.values if x.dtype in (torch.int64, torch.uint64)]
    return all(abs(int(x)) <= _EXACT for x in wide)


def _over_data(here: Returned, mesh: Mesh) -> Returned:
    """Agree over the data axis: metric objects log the mean, others without `sync_dist` the first.

    With `sync_dist` Lightning reduces a value itself.
    """
    if mesh.layout.data == 1:
        return here
    chosen = [
        i
        for i, x in enumerate(here.logged)
        if x.value is not None and (x.metric is not None or not x.options.get("sync_dist"))
    ]
    if not chosen:
        return here
    names = zlib.crc32(repr([here.logged[i].name for i in chosen]).encode())
    flat = [torch.tensor([float(names)], dtype=torch.float64, device=mesh.device)]
    for i in chosen:
        entry = here.logged[i]
        assert entry.value is not None
        share = 1 / mesh.layout.data if entry.metric is not None else float(mesh.data_rank == 0)
        value = entry.value.double().reshape(-1).to(mesh.device)
        flat.append(value * share if share else torch.zeros_like(value))
    box = torch.cat(flat)
    dist.all_reduce(box, group=mesh.data)
    if box[0] != names * mesh.layout.data:
        raise RuntimeError(
            "training_step logs other names on other copies of the model: "
            f"{[here.logged[i].name for i in chosen]} on rank {mesh.rank}; log the same everywhere"
        )
    logged, at = list(here.logged), 1
    for i in chosen:
        old = logged[i].value
        assert old is not None
        new = box[at : at + old.numel()].reshape(old.shape).to(old.dtype)
        logged[i] = replace(logged[i], value=new)
        at += old.numel()
    return replace(here, logged=logged)
