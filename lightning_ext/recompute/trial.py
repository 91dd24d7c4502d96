"""A call that is run again at once, to see whether it comes out as it did."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_ext._compat import isolate_rng
from lightning_ext.recompute.attributes import Unlike
from lightning_ext.recompute.frames import Call, never
from lightning_ext.recompute.tensors import same, tensors_in


class Different(Exception):
    """A call does not come out as it did; says why."""


class _Saved:
    """What a call saves when it is run again, beside what it saved at first.

    Args:
        values: What it saved; what is the same is replaced here.
    """

    def __init__(self, values: dict[int, Tensor]) -> None:
        self.values = values
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.pending: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> None:
        """A hook on what is saved."""
        number = len(self.shapes)
        truth = self.values.get(number)
        self.shapes.append((tensor.shape, tensor.dtype))
        # Bytes are what operators note for themselves, in part of memory that is never written.
        if truth is None or tensor.dtype == torch.uint8:
            return
        if same(tensor, truth):
            self.values[number] = tensor.detach()
        else:
            # An operator may write to what it saves, as batch norm to running means.
            self.pending[number] = tensor.detach()

    def alike(self) -> bool:
        """Whether what differed when it was saved is the same in the end."""
        return all(same(tensor, self.values[n]) for n, tensor in self.pending.items())


def run_again(
    call: Call, args: Any, kwargs: Any, output: Any, watch: AbstractContextManager[Any]
) -> Any:
    """Run a call again and see whether all is the same, bit for bit.

    Args:
        call: Whose `values` are what it has saved. What is the same is replaced there by what it
            saves now, so that memory is taken once.
        args: Its positional arguments.
        kwargs: Others.
        output: What it has returned.
        watch: In which it is run.

    Returns:
        What it returns now.

    Raises:
        Different: Something is not the same.
    """
    if call.asked:
        raise Different("it asks for gradients while it runs")
    saved = _Saved(call.values)
    try:
        with (
            isolate_rng(),  # of Python and NumPy
            call.around.again(grad=True),
            call.own.again(call.known),
            saved_tensors_hooks(saved.pack, never),
            watch,
        ):
            if call.writes:
                args = (args[0].clone(), *args[1:])
            # Not through hooks: they have gathered what is divided over ranks.
            found = call.module.forward(*args, **kwargs)
            alike = _alike(found, output) and saved.alike()
    except torch.OutOfMemoryError:
        raise
    except Unlike as error:
        raise Different(error.reason) from error
    except Exception as error:
        raise Different(f"run twice, it raises {type(error).__name__}: {error}") from error
    if not alike or call.changed(saved.shapes):
        raise Different("run twice, it does not give the same")
    call.values.update(saved.pending)
    return found


def _alike(found: Any, expected: Any) -> bool:
    tensors, others = tensors_in(found), tensors_in(expected)
    return len(tree_leaves(found)) == len(tree_leaves(expected)) and (
        len(tensors) == len(others) and all(map(same, tensors, others))
    )
