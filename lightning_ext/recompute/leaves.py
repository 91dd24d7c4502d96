"""Layers inside a block whose outputs are made again from their inputs.

A norm, an activation or dropout costs next to nothing, but the layer after it saves its output.
While a block runs, what it saves is looked at: the output of such a layer, or a view of it, is
replaced by what brings it back. Its input stays anyway, as the layer itself saves it, or is brought
back likewise.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from lightning_ext._torch import is_transforming, version_of
from lightning_ext.recompute.attributes import Attributes, Owners, Unlike
from lightning_ext.recompute.hooks import Hook
from lightning_ext.recompute.ledger import held
from lightning_ext.recompute.state import Surroundings
from lightning_ext.recompute.tensors import Identity, as_saved, stays, storage_of, tensors_in


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer.

    Args:
        module: It.
        args: Positional arguments.
        kwargs: Others.
        around: Random state and autocast.
        own: What it has of its own.
    """

    module: nn.Module
    args: Any
    kwargs: Any
    around: Surroundings
    own: Attributes

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run it again, with these arguments."""
        with self.around.again(grad=False), self.own.again():
            return self.module.forward(*args, **kwargs)


@dataclass(frozen=True)
class Input:
    """An argument that is kept, and may be written to by code that comes later.

    Args:
        tensor: It.
        version: How often it had been written to.
    """

    tensor: Tensor
    version: int


@dataclass
class Made:
    """An output that can be made again.

    Args:
        layer: Whose output it is.
        identity: Of the output.
        offset: Of the output in its memory.
        users: Places in the graph where it is asked for.
        kept: The output, from the first use to the last.
    """

    layer: LayerCall
    identity: Identity
    offset: int
    users: int = 0
    kept: Tensor | None = None

    def value(self) -> Tensor:
        """The output."""
        if self.kept is not None:
            return self.kept
        found: Tensor = self.layer.run(*tree_map(self._look, (self.layer.args, self.layer.kwargs)))
        if self.users > 0:
            self.kept = found
            held(found)
        return found

    def _look(self, value: Any) -> Any:
        if isinstance(value, Input):
            if version_of(value.tensor) != value.version:
                layer = type(self.layer.module).__name__
                name = self.layer.own.name
                raise Unlike(name, f"the input of its {layer} has been written to in between")
            return value.tensor
        return value.look() if isinstance(value, Piece) else value


@dataclass(frozen=True)
class Piece:
    """An output that can be made again, or a view of it.

    Args:
        made: The output.
        size: Of the view.
        stride: Of the view.
        offset: Of the view, from the beginning of the output.
    """

    made: Made
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, made: Made) -> Piece:
        """The piece of an output that a tensor is."""
        return cls(made, tensor.size(), tensor.stride(), int(tensor.storage_offset()) - made.offset)

    def look(self) -> Tensor:
        """The tensor, for another layer that is made again."""
        base = self.made.value()
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)

    def value(self) -> Tensor:
        """The tensor, for the place in the graph that asks for it."""
        found = self.look()
        self.made.users -= 1
        if self.made.users <= 0:
            self.made.kept = None
        return found


@dataclass
class Held:
    """What a layer saves while it is not known yet whether that is its output.

    Args:
        tensor: Or what brings it.
    """

    tensor: Tensor | Piece

    def value(self) -> Tensor:
        """The tensor."""
        return self.tensor if isinstance(self.tensor, Tensor) else self.tensor.value()


@dataclass
class _Open:
    """A layer that is running."""

    layer: LayerCall
    held: list[Held] = field(default_factory=list)


Chosen = Mapping[nn.Module, frozenset[int]]


class _Running(threading.local):
    def __init__(self) -> None:
        self.stack: list[Leaves] = []


_running = _Running()


class Leaves:
    """A context in which a block runs and outputs of some of its layers are not kept.

    Args:
        calls: Numbers of the calls of each of these layers; none has layers of its own.
        name: Of the block.
        parameters: Whether parameters are put back; see `Owners`. Default: True.
    """

    def __init__(self, calls: Chosen, name: str, parameters: bool = True) -> None:
        self.calls, self.name, self.parameters = calls, name, parameters
        self._counts = Counter[nn.Module]()
        self._made: dict[int, Made] = {}
        self._open: _Open | None = None

    def __enter__(self) -> Leaves:
        _running.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _running.stack.remove(self)

    def pack(self, tensor: Tensor) -> Any:
        """What stands for a tensor in the graph."""
        if stays(tensor):
            return as_saved(tensor)
        found = self._found(tensor)
        if found:
            return self._piece(tensor, found)
        if self._open is not None:
            self._open.held.append(Held(tensor.detach()))
            return self._open.held[-1]
        held(tensor)
        return tensor.detach()  # with its graph, an output would keep itself for ever

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A layer begins."""
        if module not in self.calls or self._open is not None:
            return
        nth = self._counts[module]
        self._counts[module] += 1
        if nth in self.calls[module]:
            owners = Owners((module,), self.parameters)
            around = Surroundings.now(tensors_in((args, kwargs)))
            args, kwargs = tree_map(self._kept, (args, kwargs))
            own = Attributes(self.name, owners)
            self._open = _Open(LayerCall(module, args, kwargs, around, own))

    def after(self, module: nn.Module, output: Any) -> None:
        """A layer is done."""
        call = self._open
        if call is None or call.layer.module is not module:
            return
        self._open = None
        made = self._new(call.layer, output)
        for kept in call.held:
            assert isinstance(kept.tensor, Tensor)
            if made is not None and made.identity.shares(kept.tensor):
                kept.tensor = self._piece(kept.tensor, made)
            else:
                held(kept.tensor)

    def _new(self, layer: LayerCall, output: Any) -> Made | None:
        if type(output) is not Tensor or (storage := storage_of(output)) is None:
            return None
        inputs = [v for v in tree_leaves((layer.args, layer.kwargs)) if isinstance(v, Input)]
        if any(storage_of(v.tensor) is storage for v in inputs):
            return None  # it has written to its input, or returned it
        made = Made(layer, Identity.of(output), int(output.storage_offset()))
        self._made[id(storage)] = made
        return made

    def _found(self, tensor: Tensor) -> Made | None:
        if type(tensor) is not Tensor:
            return None
        found = self._made.get(id(storage_of(tensor)))
        return found if found and found.identity.holds(tensor) else None

    def _piece(self, tensor: Tensor, made: Made) -> Piece:
        made.users += 1
        return Piece.of(tensor, made)

    def _kept(self, value: Any) -> Any:
        found = self._found(value) if isinstance(value, Tensor) else None
        if found:
            return Piece.of(value, found)
        return Input(value.detach(), version_of(value)) if isinstance(value, Tensor) else value


def attach(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Let layers tell the block that is running when they begin and end."""
    before, after = Hook(_before), Hook(_after)
    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(
            module.register_forward_hook(after, with_kwargs=True, prepend=True, always_call=True)
        )
    return handles


def _before(module: nn.Module, args: Any, kwargs: Any) -> None:
    if _running.stack and not is_transforming():
        _running.stack[-1].before(module, args, kwargs)


def _after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if _running.stack and not is_transforming():
        _running.stack[-1].after(module, output)
