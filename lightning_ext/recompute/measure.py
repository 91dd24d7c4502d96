"""What the blocks of a model save and cost, measured while each of them is run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_ext._torch import is_compiled, version_of
from lightning_ext.recompute.advice import Checkpoints
from lightning_ext.recompute.attributes import Attributes, Owners
from lightning_ext.recompute.frames import Call
from lightning_ext.recompute.leaves import LayerCall, Leaves
from lightning_ext.recompute.ledger import Ledger
from lightning_ext.recompute.state import Surroundings
from lightning_ext.recompute.tensors import (
    ByMemory,
    copied,
    first_of,
    memory_of,
    owned_by,
    same,
    tensors_in,
)
from lightning_ext.recompute.trial import run_again
from lightning_ext.recompute.work import Work, estimate

Key = tuple[str, int]  # name of the block, and how often it was called before in this step


@dataclass
class Layer:
    """A layer inside a block, as it was seen.

    Args:
        module: It.
        nth: How often it was called before in this block.
        inputs: Addresses of its inputs.
        output: Address and bytes of its output.
        cost: Of its forward pass.
        sound: Whether its output can be made again.
        stale: Addresses of inputs that were written to after it had run.
    """

    module: nn.Module
    nth: int
    inputs: set[int]
    output: tuple[int, int]
    cost: float
    sound: bool = True
    stale: set[int] = field(default_factory=set)


@dataclass
class Seen:
    """A call of a block, as it was seen when it was run again.

    Args:
        saved: Bytes by address.
        places: Address of each tensor that was saved, by number; -1 for parameters.
        asked: Numbers in the order in which the backward pass has asked for them.
        first: Address of its first argument.
        inputs: Addresses of all its inputs.
        output: Address and bytes of its output.
        layers: Inside, in the order of their calls.
        cost: Of all of it.
        weights: Bytes of attention weights that it saves.
    """

    saved: dict[int, int]
    places: list[int]
    asked: list[int]
    first: int
    inputs: set[int]
    output: tuple[int, int]
    layers: list[Layer]
    cost: float
    weights: int


class _Layers(Leaves):
    """Looks at the layers of a block, and makes the output of each again.

    Args:
        call: Of the block.
        work: Counts what it does.
        checkpoints: Where it is noted that they are in checkpoints.
    """

    def __init__(self, call: Call, work: Work, checkpoints: Checkpoints) -> None:
        super().__init__({}, call.name, call.own.parameters)
        self.work, self.found, self.checkpoints = work, list[Layer](), checkpoints
        self._begun: tuple[LayerCall, list[tuple[Tensor, int]], float] | None = None
        self._alive: list[tuple[Layer, list[tuple[Tensor, int]], Tensor, int]] = []
        self._counts = Counter[nn.Module]()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._begun is None:
            self.checkpoints.look(self.name)
            inputs = tensors_in((args, kwargs))
            around = Surroundings.now(inputs)
            own = Attributes(self.name, Owners((module,), self.parameters))
            with self.work.paused():
                args, kwargs = tree_map_only(Tensor, _apart, (args, kwargs))
            call = LayerCall(module, args, kwargs, around, own)
            self._begun = call, [(t, version_of(t)) for t in inputs], self.work.cost

    def after(self, module: nn.Module, output: Any) -> None:
        if self._begun is None or self._begun[0].module is not module:
            return
        call, inputs, cost = self._begun
        self._begun = None
        if type(output) is Tensor:
            nth, cost = self._counts[module], self.work.cost - cost
            places = {memory_of(t)[0] for t, _ in inputs}
            layer = Layer(module, nth, places, memory_of(output), cost, self._sound(call, output))
            self.found.append(layer)
            # An address is used again when it is free.
            self._alive.append((layer, inputs, output, version_of(output)))
        self._counts[module] += 1

    def _sound(self, call: LayerCall, output: Tensor) -> bool:
        with self.work.paused():
            try:
                found = call.run(call.args, call.kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception:
                return False
            return isinstance(found, Tensor) and same(found, output)

    def finish(self) -> None:
        """The block is done: note what was written to after layers had seen it."""
        last: dict[int, int] = {}
        spoilt = set[int]()
        for layer, inputs, _, version in self._alive:
            address = layer.output[0]
            for tensor, begun in inputs:
                if memory_of(tensor)[0] == address and last.get(address, begun) != begun:
                    spoilt.add(address)
                if version_of(tensor) != begun:
                    layer.stale.add(memory_of(tensor)[0])
            last[address] = version
        for layer, _, output, _ in self._alive:
            address = layer.output[0]
            if address in spoilt or version_of(output) != last[address]:
                layer.sound = False
        self._alive.clear()


def _apart(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else copied(tensor)


@dataclass
class _Forward:
    """A call of a block.

    Args:
        key: Of the call.
        linked: Whether its first argument is the output of the call before.
        held: Whether code outside blocks holds its output, or another block takes it.
        trial: As it was seen when it was run again.
    """

    key: Key
    linked: bool
    held: bool = False
    trial: Seen | None = None

    @property
    def seen(self) -> Seen | None:
        """As it was seen, if the backward pass has asked for anything of it."""
        return self.trial if self.trial is not None and self.trial.asked else None


class Measurement:
    """One step in which every block is run again by itself.

    `other` is the cost of what is outside of blocks; none if that is not known.

    Args:
        free: Tensors that count nothing: parameters, buffers, the batch.
    """

    def __init__(self, free: Iterable[Tensor]) -> None:
        self.calls: list[_Forward] = []
        self.outside: list[tuple[int, int]] = []  # number of the next call, and bytes
        self.other: float | None = None
        self.checkpoints = Checkpoints()
        self._ledger = Ledger(free)
        self._outputs = ByMemory[int]()

    def began(self, key: Key, linked: bool, args: Any) -> None:
        """A block is called.

        Args:
            key: Of the call.
            linked: Whether its first argument is the output of the call before.
            args: Arguments as the block gets them.
        """
        for t in tensors_in(args):
            if not (linked and t is first_of(args[0])):
                self.hold(t)
        self.calls.append(_Forward(key, linked))

    def ended(self, output: Any) -> None:
        """The block has returned."""
        for t in tensors_in(output):
            self._outputs.set(t, len(self.calls) - 1)

    def hold(self, tensor: Tensor) -> None:
        """Code outside blocks saves a tensor, or a block takes one from outside."""
        number = self._outputs.get(tensor)
        if number is not None:
            self.calls[number].held = True
        if size := self._ledger.hold(tensor):
            self.outside.append((len(self.calls), size))

    def tried(self, call: Call, first: Tensor | None, output: Any) -> None:
        """Run the last call again, and look at it.

        Args:
            call: With what it has saved.
            first: Its first argument as it was.
            output: What it has returned.

        Raises:
            Different: It does not come out as it did.
        """
        work = Work()
        layers = _Layers(call, work, self.checkpoints)
        args, kwargs = call.taken(first)
        result = first_of(run_again(call, args, kwargs, output, _watched(call, layers, work)))
        layers.finish()
        owned = owned_by(call.module)
        saved = {n: memory_of(t) for n, t in call.values.items()}
        sizes = {a: size for a, size in saved.values() if a not in owned}
        given = first_of(args[0]) if args else None
        self.calls[-1].trial = Seen(
            sizes,
            [saved[n][0] if n in saved else -1 for n in range(len(call.shapes))],
            call.asked,
            -1 if given is None else memory_of(given)[0],
            {memory_of(t)[0] for t in tensors_in((args, kwargs))},
            (-1, 0) if result is None else memory_of(result),
            layers.found,
            work.cost or estimate(call.module, given),
            sum(sizes.get(address, 0) for address in work.weights),
        )


@contextmanager
def _watched(call: Call, layers: _Layers, work: Work) -> Iterator[None]:
    # Operators in compiled code cannot be counted.
    with layers, nullcontext() if is_compiled(call.module) else work:
        yield
