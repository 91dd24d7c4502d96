"""Calls of modules whose saved tensors are dropped, and made again when they are asked for.

torch lets two hooks stand between a graph and the tensors that it saves for the backward pass. Here
the first drops what a call saves and notes its place; the second runs the call again, from its kept
input, when the backward pass comes to it. A run of calls, each with the output of the one before as
input, keeps the input of the first only. When it is needed, it is run through once: what the plan
keeps of it this time is saved, and of runs within it that are recomputed again only the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from lightning_ext._compat import is_of_parameter
from lightning_ext.recompute.leaves import Chosen, Leaves
from lightning_ext.recompute.ledger import held
from lightning_ext.recompute.state import Surroundings, buffers_aside
from lightning_ext.recompute.tensors import first_of, tensors_in
from lightning_ext.recompute.units import is_sharded
from strategies.checkpointing import Span

Packed = Any  # a tensor, or an object with a method `value` that brings it


class Watch(Protocol):
    """Looks on while a call is run again."""

    def over(self, call: Call) -> AbstractContextManager[None]:
        """A context for the run."""

    def seen(self, call: Call, args: Any, saved: Sequence[Tensor], output: Any) -> None:
        """What it took, saved and returned."""


@dataclass
class Call:
    """One call of a module.

    Args:
        module: That is called.
        args: Positional arguments; in a run, the first is the output of the call before.
        kwargs: Others.
        around: Random state and autocast.
        leaves: Calls of its layers whose outputs are not kept.
        writes: Whether it writes to its input.
        chained: Whether its first argument comes from the call before in its run.
        wants: Whether this argument wants a gradient.
        shapes: Shape and dtype of each tensor that its forward pass has saved.
        values: Those that are there again, by number.
        asked: Numbers in the order in which the backward pass has asked for them.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    around: Surroundings
    leaves: Chosen = field(default_factory=dict)
    writes: bool = False
    chained: bool = False
    wants: bool = False
    shapes: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    values: dict[int, Packed] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module itself, past hooks on it: what they do is code outside."""
        if self.writes:
            args = (args[0].clone(), *args[1:])
        # Sharded parameters are gathered by hooks.
        run = self.module if is_sharded(self.module) else self.module.forward
        return run(*args, **kwargs)


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
        watch: Looks on. Default: nobody does.
    """

    def __init__(self, inner: Sequence[Span] = (), watch: Watch | None = None) -> None:
        self.calls: list[Call] = []
        self.inner, self.watch = inner, watch
        self.starts: dict[int, Any] = {}

    def begin(self, call: Call) -> AbstractContextManager[Any]:
        """Add a call; what is saved in the context is dropped."""
        index = len(self.calls)
        if index:
            # What comes from the call before is not kept, wherever it is passed.
            first = call.args[0]
            call.chained, call.wants = True, first.requires_grad
            call.args, call.kwargs = tree_map_only(
                Tensor, lambda t: _BEFORE if t is first else t, (call.args, call.kwargs)
            )
        else:
            self.starts[0] = None
        for tensor in tensors_in((call.args, call.kwargs)):
            held(tensor)
        self.calls.append(call)

        def pack(tensor: Tensor) -> Packed:
            if is_of_parameter(tensor):
                return tensor.detach()  # it is there in any case
            call.shapes.append((tensor.shape, tensor.dtype))
            return Slot(self, index, len(call.shapes) - 1)

        return saved_tensors_hooks(pack, unpack)

    def value(self, index: int, number: int) -> Tensor:
        """A dropped tensor; it is recomputed if need be."""
        call = self.calls[index]
        while number not in call.values:
            self._again(index)
        call.asked.append(number)
        return unpack(call.values.pop(number))

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
        start, stop, inner = 0, len(self.calls), self.inner
        while True:
            deeper = [s for s in inner if s.start <= index < s.stop and s.start in self.starts]
            if not deeper:
                return start, min(stop, len(self.calls)), inner
            start, stop, inner = deeper[0].start, deeper[0].stop, deeper[0].inner

    def _run(self, index: int, state: Tensor | None, keep: bool) -> Any:
        call = self.calls[index]
        args, kwargs = _again(call, state)
        if not keep:
            with call.around.again(grad=False), buffers_aside(call.module):
                return call.run(*args, **kwargs)
        seen: list[Packed] = []
        shapes: list[tuple[torch.Size, torch.dtype]] = []
        leaves = Leaves(call.leaves)

        def pack(tensor: Tensor) -> None:
            if not is_of_parameter(tensor):
                shapes.append((tensor.shape, tensor.dtype))
                seen.append(leaves.pack(tensor.detach()))

        with (
            call.around.again(grad=True),
            buffers_aside(call.module),
            saved_tensors_hooks(pack, _never),
            leaves,
            self.watch.over(call) if self.watch else nullcontext(),
        ):
            output = call.run(*args, **kwargs)
        if shapes != call.shapes:
            raise RuntimeError(
                f"{type(call.module).__name__} saved {len(call.shapes)} tensors when it was run "
                f"and {len(shapes)}, or others, when it was run again for the backward pass: its "
                "forward depends on something that has changed in between; name it in exclude="
            )
        if self.watch:
            self.watch.seen(call, (args, kwargs), [unpack(s) for s in seen], output)
        call.values = dict(enumerate(seen))
        return tree_map_only(Tensor, Tensor.detach, output)


def unpack(packed: Packed) -> Tensor:
    """The tensor that something stands for."""
    found: Tensor = packed if isinstance(packed, Tensor) else packed.value()
    return found


class _Before:
    """Stands for what the call before returns."""


_BEFORE = _Before()


def _again(call: Call, state: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for another run; what was one tensor in several places is so again."""
    made: dict[int, Tensor] = {}

    def leaf(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    found = tree_map_only(Tensor, leaf, (call.args, call.kwargs))
    if call.chained:
        assert state is not None
        first = state.detach().requires_grad_(call.wants)
        found = tree_map_only(_Before, lambda _: first, found)
    args, kwargs = found
    return args, kwargs


def _never(packed: None) -> Tensor:
    raise RuntimeError("the graph of a recomputation is never used")
