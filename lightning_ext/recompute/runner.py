"""Stands beside the blocks of a model: measures them, or runs them again as planned."""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from lightning_ext._torch import (
    has_hooks_of_others,
    is_transforming,
    transforms_allowed,
    version_of,
)
from lightning_ext.recompute import leaves
from lightning_ext.recompute.advice import Checkpoints
from lightning_ext.recompute.attributes import Attributes, Owners, Place, Unseen
from lightning_ext.recompute.blocks import Applied, Table, table
from lightning_ext.recompute.frames import Call, Frame, unpack
from lightning_ext.recompute.hooks import Hook
from lightning_ext.recompute.leaves import Chosen, Leaves
from lightning_ext.recompute.ledger import Ledger, counting, held, is_counting
from lightning_ext.recompute.measure import Key, Measurement
from lightning_ext.recompute.microbatched import Microbatched, microbatched
from lightning_ext.recompute.outside import Outside
from lightning_ext.recompute.running import Given, Last, Open, Run, private
from lightning_ext.recompute.state import Surroundings
from lightning_ext.recompute.tensors import as_saved, copied, first_of, stays, tensors_in
from lightning_ext.recompute.trial import Different
from lightning_ext.recompute.units import is_sharded, layers_in
from strategies.checkpointing import Span


@dataclass
class Runner:
    """Stands beside some modules.

    Args:
        units: Modules by name; none inside another.
        applied: What is run again. Default: nothing.
        measurement: Of this step: every block is run again. Default: none.
        on: Whether a forward pass of the step is running.
        writes: Numbers of calls whose first argument is written to.
        excluded: Blocks that are never run again, and why.
        agree: Tells all ranks whether all say yes, and gets whether the block is divided over
            them. Default: this is the only one.
        model: That the modules are in, whose other work is counted. Default: None, it is not.
    """

    units: Mapping[str, nn.Module]
    applied: Applied | None = None
    measurement: Measurement | None = None
    on: bool = False
    writes: set[int] = field(default_factory=set)
    excluded: dict[str, str] = field(default_factory=dict)
    agree: Callable[[bool, bool], bool] = lambda yes, _: yes
    model: nn.Module | None = None

    def __post_init__(self) -> None:
        self._names = {module: name for name, module in self.units.items()}
        self._owners: dict[str, Owners] = {}
        self._known: dict[str, set[Place]] = {name: set() for name in self.units}
        self._handles: list[RemovableHandle] = []
        self._rest: Outside | None = None
        self.checkpoints = Checkpoints()
        self.in_vain = False  # whether nothing was asked of any block in the last measured step
        self._spans: dict[int, Span] = {}
        self._numbers: dict[Key, int] = {}
        self._forget()

    def _forget(self) -> None:
        self.unknown = False
        self._counts, self._calls = Counter[str](), 0
        self._last = Last()
        self._run: Run | None = None
        self._open: Open | None = None
        self._expected = 0
        self._given: list[Given] = []

    def measure(self, free: Iterable[Tensor]) -> None:
        """Measure the next step.

        Args:
            free: Tensors that count nothing: parameters, buffers, the batch.
        """
        self.measurement, self.applied = Measurement(free), None
        self.checkpoints = self.measurement.checkpoints
        self.writes.clear()
        self._excluded_before = len(self.excluded)
        self._attach(layer for unit in self.units.values() for _, layer in layers_in(unit))
        if self.model is not None:
            self._rest = Outside(self.model, self.units.values(), self._is_outside)
            self._handles += self._rest.attach()

    def _is_outside(self) -> bool:
        return self.on and self._open is None

    def measured(self, strategy: Any = None) -> Table | Microbatched | None:
        """The blocks of the step that was measured.

        Args:
            strategy: Of the trainer. Default: None, the step was run at once.

        Returns:
            None if the step had no backward pass, or blocks were excluded in it.
        """
        assert self.measurement is not None
        measured, writes = self.measurement, frozenset(self.writes)
        self.measurement = None
        if self._rest is not None and self._rest.known:
            measured.other = self._rest.cost
        nothing = not any(call.seen for call in measured.calls)
        self.in_vain = nothing and not self.excluded
        if nothing or len(self.excluded) > self._excluded_before:
            return None
        return microbatched(measured, writes, strategy) or table(measured, writes)

    def apply(self, applied: Applied) -> None:
        """Run again what a plan says."""
        self.applied = applied
        self._numbers = {key: number for number, key in enumerate(applied.order)}
        self._spans = {span.start: span for span in applied.spans}
        layers = {layer for chosen in applied.layers.values() for layer in chosen}
        self._attach(layers if self._spans or layers else None)

    def _attach(self, layers: Iterable[nn.Module] | None) -> None:
        self.detach()
        if layers is None:
            return
        self._owners = {name: Owners.inside(unit) for name, unit in self.units.items()}
        before, after = Hook(self._before), Hook(self._after)
        for module in self.units.values():
            # Nearest to the forward pass of the module, so that other hooks are code outside.
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(
                module.register_forward_hook(after, prepend=True, always_call=True)
            )
        self._handles += leaves.attach(layers)

    def detach(self) -> None:
        """Leave the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for a step, or for its forward pass."""
        self._forget()
        self.on = True
        outside = self.measurement is not None or is_counting()
        try:
            with transforms_allowed(), self._hooks() if outside else nullcontext():
                yield
        finally:
            self.pause()
            if self._open is not None:  # the forward pass has raised
                self._open.contexts.close()
                self._open = None

    def pause(self) -> None:
        """What follows is no forward pass of the step."""
        self._look()
        self.on, self._run = False, None  # the last frame goes when its graph does

    def go_on(self) -> None:
        """The forward pass of the step goes on."""
        self.on = True

    def held(self, free: Iterable[Tensor], step: Callable[[], Any]) -> int:
        """Bytes held for the backward pass at most, during a step.

        Args:
            free: Tensors that count nothing: parameters, buffers, the batch.
            step: Runs it.
        """
        ledger = Ledger(free)
        with counting(ledger):
            step()
        return ledger.peak

    def _hooks(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self._outside, unpack)

    def _outside(self, tensor: Tensor) -> Tensor:
        if not stays(tensor):
            if self.measurement is not None:
                self.measurement.hold(tensor)
            held(tensor)
        return as_saved(tensor)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names.get(module)  # none for a copy of the model
        if name is None or not self.on or self._open is not None:
            return
        if self.measurement is not None:
            self.checkpoints.look(name)
        if not torch.is_grad_enabled():
            return
        # Inside of `torch.func`, and of checkpoints and the like, others see to what is saved.
        if name in self.excluded or is_transforming() or has_hooks_of_others():
            return
        key = name, self._counts[name]
        self._counts[name] += 1
        self._open = Open(name, module, ExitStack(), error=sys.exception())
        if self.measurement is not None:
            self._measured(key, args, kwargs)
        elif self.applied is not None:
            self._planned(key, args, kwargs)
        self._calls += 1

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        assert self._open is not None
        name = self._open.name
        around = Surroundings.now(tensors_in((args, kwargs)))
        own = Attributes(name, self._owners[name])
        return Call(name, self._open.module, args, kwargs, around, own, self._known[name])

    def _measured(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.measurement is not None
        assert self._open is not None
        self._look()
        # Gathering the parameters of several blocks at once is left to what divided them.
        linked = self._last.taken_by(args) and not is_sharded(self._open.module)
        if self._run is None or not linked or self._calls >= self._run.stop:
            length = max(1, round(math.sqrt(len(self.units))))
            self._run = Run(Frame(), self._calls + length)
        # The block, or code after it, may write to what it takes: whether it does is seen today.
        begun = args[0] if self._run.frame.calls else None
        self._open.first = None if begun is None else copied(begun)
        call = self._call(*private((args, kwargs), but=begun))
        call.truth = True
        self.measurement.began(key, linked, args)
        self._given += [
            Given(key[0], self._calls, t is first_of(args), weakref.ref(t), version_of(t))
            for t in tensors_in((args, kwargs))
        ]
        self._open.call, self._open.unseen = call, Unseen(self._owners[key[0]])
        self._open.contexts.enter_context(self._run.frame.begin(call))

    def _planned(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.applied is not None
        assert self._open is not None
        number = self._numbers.get(key)
        self.unknown |= number is None
        chosen: Chosen = {} if number is None else self.applied.layers.get(number, {})
        frame = self._frame(number, args)
        if frame is not None:
            call = self._call(args, kwargs)
            call.leaves, call.writes = chosen, number in self.applied.writes
            self._open.contexts.enter_context(frame.begin(call))
        elif chosen:
            inside = Leaves(chosen, key[0], self._owners[key[0]].parameters)
            self._open.contexts.enter_context(saved_tensors_hooks(inside.pack, unpack))
            self._open.contexts.enter_context(inside)

    def _frame(self, number: int | None, args: tuple[Any, ...]) -> Frame | None:
        goes_on = (
            self._run is not None
            and number == self._expected < self._run.stop
            and self._last.taken_by(args)
        )
        if not goes_on:
            self._run = None
            if number is None or number not in self._spans:
                return None
            span = self._spans[number]
            self._run = Run(Frame(shifted(span.inner, number)), span.stop)
        assert self._run is not None
        assert number is not None
        self._expected = number + 1
        return self._run.frame

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._open
        if call is None or call.module is not module:
            return
        self._open = None
        call.contexts.close()
        self._last = Last.of(output)
        if self.measurement is not None and call.call is not None and sys.exception() is call.error:
            self.measurement.ended(output)
            if call.unseen is not None and (reason := call.unseen.found()):
                self.excluded.setdefault(call.name, reason)
            self._try(call.call, call.first, output)

    def _try(self, call: Call, first: Tensor | None, output: Any) -> None:
        """See whether a call can be run again; if so, what it has saved is dropped."""
        assert self.measurement is not None
        self._look()
        call.writes = self._calls - 1 in self.writes
        self._known[call.name] |= call.own.changed()
        self.on = False
        try:
            if call.name not in self.excluded:
                self.measurement.tried(call, first, output)
        except Different as reason:
            self.excluded[call.name] = str(reason)
        self.on = True
        if not self.agree(call.name not in self.excluded, is_sharded(call.module)):
            self.excluded.setdefault(call.name, "another rank cannot run it again")
        if call.name in self.excluded:
            self._run = None
        else:
            call.truth, call.values = False, {}

    def _look(self) -> None:
        """See whether arguments of blocks have been written to."""
        left = []
        for given in self._given:
            tensor = given.tensor()
            if tensor is None:
                continue
            if version_of(tensor) == given.version:
                left.append(given)
            elif given.first:
                self.writes.add(given.call)
            else:
                self.excluded.setdefault(given.name, "an argument besides its first is written to")
        self._given = left


def shifted(spans: Iterable[Span], by: int) -> tuple[Span, ...]:
    """Spans with indices that count from a later block."""
    return tuple(Span(span.start - by, span.stop - by, shifted(span.inner, by)) for span in spans)
