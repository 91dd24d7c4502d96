"""Blocks run again in the backward pass on torch.

Loaded on the torch backend only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from keras_ext._table import Call, Measured
from keras_ext.backends.call_state import Births, CallState, raw_values, state_of
from keras_ext.backends.torch_hooks import Saved, memory, transforms_allowed
from keras_ext.backends.torch_trial import Trial
from strategies.checkpointing.shapes import Shapes

if TYPE_CHECKING:
    from keras_ext.backends.recompute import Recompute

# Writing an element takes as long as this many operations of a matrix product, about.
_ELEMENT = 16

# Gradients of the last step are there until the next one begins.
KEEPS_GRADIENTS = True
IS_PURE = False


def step(recompute: Recompute, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a training step, with all blocks run again if it is to be measured.

    Args:
        recompute: What is run again.
        function: Of Keras, for training.
        args: That it gets.
    """
    batch = keras.tree.flatten(args)
    shapes = tuple(tuple(x.shape) for x in batch if hasattr(x, "shape"))
    try:
        if recompute.knows(shapes):
            return function(*args)
        meter = Meter(shapes, recompute.refuse)
        with recompute.measuring(meter), meter.step([*recompute.model.variables, *batch]):
            result = function(*args)
    except CheckpointError as error:
        error.add_note(
            f"DynamicGradientCheckpointing: block {_Again.last!r} was called again for the "
            "backward pass and has not done the same, as what it depends on has changed in "
            f"between. Put it in exclude=[{_Again.last!r}]"
        )
        raise
    recompute.settle(shapes, meter.measured())
    return result


@torch.compiler.disable
def run(
    layer: keras.Layer,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meter: Meter | None = None,
) -> Any:
    """Call a block so that it is called again in the backward pass.

    Statistics and seeds have changed by then: it is called again with copies of what they are now,
    and the changes that it makes to these are dropped.

    Args:
        layer: The block.
        call: What it does.
        args: That it gets.
        kwargs: Others.
        meter: Measures it. Default: None, it is not measured.
    """
    again = _Again(layer, call, args, kwargs)
    is_first = True

    def block(*args: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return again.first(args) if meter is None else meter.over(again, args)
        if meter is not None:
            meter.backward_begins()
        return again(args)

    # Where it stopped early, masks that a layer keeps for its next call would stay as they are.
    return checkpoint(block, *args, use_reentrant=False, early_stop=False)


class _Again:
    """A call that is made, and made again.

    Args:
        layer: The block.
        call: What it does.
        args: That it gets.
        kwargs: Others.

    Attributes:
        last: Name of the block that was called again last.
    """

    last = ""

    def __init__(
        self,
        layer: keras.Layer,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.layer, self.kwargs, self._call = layer, kwargs, call
        self._around = CallState(keras.tree.flatten((args, kwargs)))
        self._state = state_of(layer)
        self._copies = [value.detach().clone() for value in raw_values(self._state)]
        self._births = Births(layer, self._state)
        self._born: list[tuple[keras.Variable, Any]] = []

    def first(self, args: tuple[Any, ...]) -> Any:
        """Make it."""
        output = self._call(*args, **self.kwargs)
        self._born = self._births.seen()
        return output

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """Make it again; what it changes is dropped."""
        _Again.last = self.layer.name
        # Made anew, as a step may have several backward passes.
        scope = keras.StatelessScope(
            [*zip(self._state, self._copies, strict=True), *self._born], initialize_variables=False
        )
        self._around.mark(keras.tree.flatten((args, self.kwargs)))
        with scope, self._around.restored():
            return self._call(*args, **self.kwargs)


class Meter:
    """Measures what blocks, and the code between them, save for the backward pass.

    Args:
        shapes: Of the batch.
        refuse: Gets the name of a block that cannot be run again, and why that is.
    """

    def __init__(self, shapes: Shapes, refuse: Callable[[str, str], None]) -> None:
        self._shapes, self._refuse = shapes, refuse
        self._transforms = 0  # of `torch.func`, so far
        self._calls: list[Call] = []
        self._between = 0
        self._seen: dict[int, Any] = {}  # storages that count nothing, or were counted
        # What calls have returned, weakly: an address is used again when it is free.
        self._outputs: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._over = False
        # The checkpoint itself saves what a block takes; `over` judges that.
        self._entering = False

    def measured(self) -> Measured | None:
        """What the step told, or none if no block took part."""
        return Measured(self._calls, self._between, self._shapes) if self._calls else None

    @contextmanager
    def step(self, free: list[Any]) -> Iterator[None]:
        """A context for the training step.

        Args:
            free: Variables and tensors that are there in any case.
        """
        variables = [x for x in free if isinstance(x, keras.Variable)]
        self._seen = dict(map(memory, _tensors_in([*raw_values(variables), *free])))
        hooks = saved_tensors_hooks(self._saved_outside, lambda x: x)
        with transforms_allowed(self._transformed), hooks:
            yield
        # Tensors are not kept beyond the step.
        self._seen, self._outputs = {}, {}

    def call(
        self,
        layer: keras.Layer,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a block, measure it, and run it again in the backward pass."""
        self._calls.append(Call(name))
        self._entering = True
        return run(layer, call, args, kwargs, self)

    def backward_begins(self) -> None:
        """Whatever is saved from now on is not there for the backward pass."""
        self._over = True

    def _transformed(self) -> None:
        self._transforms += 1

    def _saved_outside(self, x: torch.Tensor) -> torch.Tensor:
        if not self._over and not self._entering:
            self._hold(x)
        return x

    def _hold(self, x: torch.Tensor) -> None:
        """Code outside of blocks saves a tensor, or a block takes one from outside."""
        key, storage = memory(x)
        if key in self._seen:
            return
        self._seen[key] = storage
        number = self._returned_by(x)
        if number is not None:
            self._calls[number].held = True
        self._between += storage.nbytes()

    def _returned_by(self, x: torch.Tensor) -> int | None:
        key, storage = memory(x)
        found, number = self._outputs.get(key, (None, 0))
        return number if found is not None and found() is storage else None

    def over(self, again: _Again, args: tuple[Any, ...]) -> Any:
        """Make the call of the last block."""
        self._entering = False
        tensors = _tensors_in((args, again.kwargs))
        number = len(self._calls) - 1
        call = self._calls[number]
        call.linked = number > 0 and bool(tensors) and self._returned_by(tensors[0]) == number - 1
        for tensor in tensors[1:] if call.linked else tensors:
            self._hold(tensor)
        call.before, self._between = self._between, 0
        trial, saved, transforms = Trial(again.layer, tensors), Saved(), self._transforms
        with _Work() as work, saved.hooks():
            output = again.first(args)
        call.cost = work.cost
        if self._transforms > transforms:
            why = "it calls transforms of torch.func"
        else:
            why = trial.why_not(output, saved.shapes, lambda: again(args))
        self._note(call, tensors, saved.storages(), output)
        if why:
            self._refuse(call.name, why)
        else:
            saved.drop()
        return output

    def _note(
        self, call: Call, tensors: list[torch.Tensor], inside: dict[int, Any], output: Any
    ) -> None:
        """What a call has taken, saved and returned."""
        taken = [memory(tensor)[0] for tensor in tensors]
        call.saves_input = bool(taken) and taken[0] in inside
        own = {key: s for key, s in inside.items() if key not in taken and key not in self._seen}
        returned = [memory(tensor) for tensor in _tensors_in(output)]
        number = len(self._calls) - 1
        self._outputs |= {key: (weakref.ref(storage), number) for key, storage in returned}
        for key, storage in returned[:1]:
            call.output, call.saves_output = storage.nbytes(), own.pop(key, None) is not None
        call.saved = sum(storage.nbytes() for storage in own.values())


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in keras.tree.flatten(tree) if isinstance(leaf, torch.Tensor)]


class _Work(TorchDispatchMode):
    """Counts operations of matrix products and convolutions, and elements that others return."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = flop_counter.flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.cost += int(formula(*args, **kwargs, out_val=output))
        elif not func.is_view:
            outputs = output if isinstance(output, (tuple, list)) else [output]
            elements = sum(t.numel() for t in outputs if isinstance(t, torch.Tensor))
            self.cost += _ELEMENT * elements
        return output
