"""What the blocks of a model save and cost, measured while each of them is run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_ext._compat import is_compiled
from lightning_ext.recompute.frames import Call
from lightning_ext.recompute.leaves import Leaves
from lightning_ext.recompute.ledger import Ledger
from lightning_ext.recompute.tensors import (
    ByMemory,
    first_of,
    memory_of,
    owned_by,
    tensors_in,
)
from lightning_ext.recompute.work import Work

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
    """

    module: nn.Module
    nth: int
    inputs: set[int]
    output: tuple[int, int]
    cost: float


@dataclass
class Seen:
    """A call of a block, as it was seen when it was run again.

    Args:
        saved: Bytes by address.
        places: Address of each tensor that was saved, by number.
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
    """Looks at the layers of a block."""

    def __init__(self, work: Work) -> None:
        super().__init__({})
        self.work, self.found = work, list[Layer]()
        self._begun: tuple[nn.Module, set[int], float] | None = None
        self._alive: list[Any] = []
        self._counts = Counter[nn.Module]()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._begun is None:
            inputs = {memory_of(t)[0] for t in tensors_in((args, kwargs))}
            self._begun = module, inputs, self.work.cost
            self._alive.append((args, kwargs))

    def after(self, module: nn.Module, output: Any) -> None:
        if self._begun is None or self._begun[0] is not module:
            return
        _, inputs, cost = self._begun
        self._begun = None
        if type(output) is Tensor:
            self._alive.append(output)  # an address is used again when it is free
            nth, cost = self._counts[module], self.work.cost - cost
            self.found.append(Layer(module, nth, inputs, memory_of(output), cost))
        self._counts[module] += 1


@dataclass
class _Forward:
    """A call of a block, as it was seen in the forward pass.

    Args:
        key: Of the call.
        linked: Whether its first argument is the output of the call before.
        held: Whether code outside blocks holds its output, or another block takes it.
        seen: When it was run again.
    """

    key: Key
    linked: bool
    held: bool = False
    seen: Seen | None = None


class Measurement:
    """One step in which every block is run again by itself.

    Args:
        free: Tensors that count nothing: parameters, buffers, the batch.
    """

    def __init__(self, free: Iterable[Tensor]) -> None:
        self.calls: list[_Forward] = []
        self.outside: list[tuple[int, int]] = []  # number of the next call, and bytes
        self._ledger = Ledger(free)
        self._numbers: dict[int, int] = {}
        self._outputs = ByMemory[int]()

    def began(self, key: Key, linked: bool, call: Call, args: Any) -> None:
        """A block is called.

        Args:
            key: Of the call.
            linked: Whether its first argument is the output of the call before.
            call: In the frame.
            args: Arguments as the block gets them.
        """
        self._numbers[id(call)] = len(self.calls)
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

    @contextmanager
    def over(self, call: Call) -> Iterator[None]:
        """A context in which a block is run again."""
        self._work = Work()
        self._layers = _Layers(self._work)
        with ExitStack() as stack:
            stack.enter_context(self._layers)
            if not is_compiled(call.module):  # operators in compiled code cannot be counted
                stack.enter_context(self._work)
            yield

    def seen(self, call: Call, args: Any, saved: Sequence[Tensor], output: Any) -> None:
        """What a block took, saved and returned when it was run again."""
        owned = owned_by(call.module)
        first = first_of(args[0][0]) if args[0] else None
        result = first_of(output)
        sizes = {a: size for a, size in map(memory_of, saved) if a not in owned}
        self.calls[self._numbers[id(call)]].seen = Seen(
            sizes,
            [memory_of(t)[0] for t in saved],
            call.asked,
            -1 if first is None else memory_of(first)[0],
            {memory_of(t)[0] for t in tensors_in(args)},
            (-1, 0) if result is None else memory_of(result),
            self._layers.found,
            self._work.cost or _estimate(call.module, first),
            sum(sizes.get(address, 0) for address in self._work.weights),
        )
        self._layers = _Layers(self._work)


def _estimate(module: nn.Module, first: Tensor | None) -> float:
    """Operations of a block, as if each row of its input were multiplied by all parameters."""
    rows = 1 if first is None or not first.ndim else first.numel() / max(first.shape[-1], 1)
    return 2.0 * rows * sum(p.numel() for p in module.parameters())
