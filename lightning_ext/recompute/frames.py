"""Calls of modules whose saved tensors are dropped, and made again when they are asked for.

torch lets two hooks stand between a graph and the tensors that it saves for the backward pass. Here
the first drops what a call saves and notes its place; the second runs the call again, from its kept
input, when the backward pass comes to it. A run of calls, each with the output of the one before as
input, keeps the input of the first only. When it is needed, it is run through once: what the plan
keeps of it this time is saved, and of runs within it that are recomputed again only the input.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map, tree_map_only

from lightning_ext._torch import version_of
from lightning_ext.recompute.attributes import Attributes, Place, Unlike
from lightning_ext.recompute.leaves import Chosen, Leaves
from lightning_ext.recompute.ledger import held
from lightning_ext.recompute.state import Surroundings
from lightning_ext.recompute.tensors import as_saved, first_of, fresh, stays, tensors_in
from lightning_ext.recompute.units import is_sharded
from strategies.checkpointing import Span

Packed = Any  # a tensor, or an object with a method `value` that brings it


@dataclass
class Call:
    """One call of a module.

    Args:
        name: Of the module.
        module: That is called.
        args: Positional arguments; in a run, the first is the output of the call before.
        kwargs: Others.
        around: Random state and autocast.
        own: What the module has of its own.
        known: Large tensors of its own that it changes and does not depend on.
        leaves: Calls of its layers whose outputs are not kept.
        writes: Whether it writes to its input.
        truth: Whether `values` are what its forward pass has saved, and stay.
        chained: Whether its first argument comes from the call before in its run.
        wants: Whether this argument wants a gradient.
        versions: Of tensors among the arguments: how often they had been written to.
        shapes: Shape and dtype of each tensor that its forward pass has saved; none for those
            that are there in any case.
        values: Those that are there again, by number.
        asked: Numbers in the order in which the backward pass has asked for them.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    around: Surroundings
    own: Attributes
    known: Collection[Place] = ()
    leaves: Chosen = field(default_factory=dict)
    writes: bool = False
    truth: bool = False
    chained: bool = False
    wants: bool = False
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    shapes: list[tuple[torch.Size, torch.dtype] | None] = field(default_factory=list)
    values: dict[int, Packed] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module itself, past hooks on it: what they do is code outside."""
        if self.writes:
            args = (args[0].clone(), *args[1:])
        # Sharded parameters are gathered by hooks.
        run = self.module if is_sharded(self.module) else self.module.forward
        return run(*args, **kwargs)

    def taken(self, state: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for another run; what was one tensor in several places is so again.

        Args:
            state: The output of the call before.

        Raises:
            Unlike: An argument has been written to.
        """
        if any(version_of(tensor) != version for tensor, version in self.versions):
            raise Unlike(self.name, "an argument of it has been written to in between")
        made: dict[int, Tensor] = {}

        def leaf(value: Any) -> Any:
            if value is _BEFORE:
                return first
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
                return fresh(value)
            if id(value) not in made:
                made[id(value)] = value.detach().requires_grad_(value.requires_grad)
            return made[id(value)]

        first = None if state is None else state.detach().requires_grad_(self.wants)
        args, kwargs = tree_map(leaf, (self.args, self.kwargs))
        return args, kwargs

    def changed(self, saved: Sequence[Any]) -> bool:
        """Whether it has not saved what it saved when it was run."""
        return len(saved) != len(self.shapes) or any(
            known is not None and known != now
            for known, now in zip(self.shapes, saved, strict=True)
        )


@dataclass(frozen=True)
class Slot:
    """Stands in a graph for a tensor that was dropped.

    Args:
        frame: To which it belongs.
        call: Number of the call in the frame.
        number: Of the tensor among those that the call saves.
    """

    frame: Frame
    call: int
    number: int

    def value(self) -> Tensor:
        """The tensor."""
        return self.frame.value(self.call, self.number)


class Frame:
    """A run of calls that is recomputed from the input of the first.

    Args:
        inner: What is recomputed once more when the run is recomputed; indices count from the
            first call of the run.
    """

    def __init__(self, inner: Sequence[Span] = ()) -> None:
        self.calls: list[Call] = []
        self.inner = inner
        self.starts: dict[int, Any] = {}

    def begin(self, call: Call) -> AbstractContextManager[Any]:
        """Add a call; what is saved in the context is dropped, or is the truth of the call."""
        index, first = len(self.calls), None
        if index:
            # What comes from the call before is not kept, wherever it is passed.
            first = call.args[0]
            call.chained, call.wants = True, first.requires_grad
        else:
            self.starts[0] = None
        # Who passes a list or a dict may change it later.
        call.args, call.kwargs = tree_map(
            lambda v: fresh(v) if v is not first or v is None else _BEFORE, (call.args, call.kwargs)
        )
        for tensor in tensors_in((call.args, call.kwargs)):
            held(tensor)
            call.versions.append((tensor, version_of(tensor)))
        self.calls.append(call)

        def pack(tensor: Tensor) -> Packed:
            if stays(tensor):
                call.shapes.append(None)
                return as_saved(tensor)
            number = len(call.shapes)
            call.shapes.append((tensor.shape, tensor.dtype))
            if call.truth:
                held(tensor)
                call.values[number] = tensor.detach()
            return Slot(self, index, number)

        return saved_tensors_hooks(pack, unpack)

    def value(self, index: int, number: int) -> Tensor:
        """A dropped tensor; it is recomputed if need be."""
        call = self.calls[index]
        while number not in call.values:
            self._again(index)
        call.asked.append(number)
        return unpack(call.values[number] if call.truth else call.values.pop(number))

    def _again(self, index: int) -> None:
        start, stop, inner = self._around(index)
        state = self.starts[start]
        spans = {span.start: span for span in inner}
        if start:
            del self.starts[start]
        i = start
        while i < stop:
            if i in spans:
                self.starts[i] = state
                if state is not None:
                    held(state)
                for j in range(i, min(spans[i].stop, stop)):
                    state = first_of(self._run(j, state, keep=False))
                i = spans[i].stop
            else:
                state = first_of(self._run(i, state, keep=True))
                i += 1

    def _around(self, index: int) -> tuple[int, int, Sequence[Span]]:
        """The smallest span around a call whose input is there."""
        # Only the last can be one that is not run again.
        most = len(self.calls) - self.calls[-1].truth
        start, stop, inner = 0, most, self.inner
        while True:
            deeper = [s for s in inner if s.start <= index < s.stop and s.start in self.starts]
            if not deeper:
                return start, min(stop, most), inner
            start, stop, inner = deeper[0].start, deeper[0].stop, deeper[0].inner

    def _run(self, index: int, state: Tensor | None, keep: bool) -> Any:
        call = self.calls[index]
        args, kwargs = call.taken(state)
        found: dict[int, Packed] = {}
        shapes: list[tuple[torch.Size, torch.dtype]] = []
        leaves = Leaves(call.leaves if keep else {}, call.name, call.own.parameters)

        def pack(tensor: Tensor) -> None:
            number = len(shapes)
            shapes.append((tensor.shape, tensor.dtype))
            if keep and number < len(call.shapes) and call.shapes[number] is not None:
                found[number] = leaves.pack(tensor.detach())

        # With gradients in any case: without, torch takes other kernels for some layers.
        with (
            call.around.again(grad=True),
            call.own.again(call.known),
            saved_tensors_hooks(pack, never),
            leaves,
        ):
            output = call.run(*args, **kwargs)
        if call.changed(shapes):
            raise Unlike(
                call.name,
                f"it saved {len(call.shapes)} tensors when it was run, and {len(shapes)}, or "
                "others, when it was run again; its forward depends on something else",
            )
        if keep:
            call.values = found
        return tree_map_only(Tensor, Tensor.detach, output)


def unpack(packed: Packed) -> Tensor:
    """The tensor that something stands for."""
    found: Tensor = packed if isinstance(packed, Tensor) else packed.value()
    return found


def never(packed: None) -> Tensor:
    """For graphs of recomputations, which are never used."""
    raise RuntimeError("the graph of a recomputation is never used")


class _Before:
    """Stands for what the call before returns."""


_BEFORE = _Before()
