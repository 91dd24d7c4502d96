"""What a module has of its own and may read and write: it is put back when it runs again."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from lightning_ext._torch import buffers_in, parameters_in, version_of
from lightning_ext.recompute.tensors import same
from lightning_ext.recompute.units import is_sharded

Place = tuple[nn.Module, str]  # a module and the name of an attribute, parameter or buffer

# What torch itself keeps in a module: layers and hooks do not change within a step.
_TORCHS = frozenset(vars(nn.Module())) - {"training"}
# Elements of a tensor that is copied at each call, as it may be written to.
_SMALL = 2**14


class Unlike(RuntimeError):
    """A block would not be run again as it was run.

    Args:
        name: Of the block.
        reason: What is different.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"{name} cannot be run again for the backward pass as it was run: {reason}. "
            f"Name it in exclude="
        )
        self.name, self.reason = name, reason


@dataclass(frozen=True)
class Owners:
    """Modules whose attributes are put back.

    Args:
        modules: They.
        parameters: Whether their parameters are, too.
    """

    modules: Sequence[nn.Module]
    parameters: bool = True

    @classmethod
    def inside(cls, module: nn.Module) -> Owners:
        """A module and those inside it."""
        found = list(module.modules())
        own = tuple(m for m in found if not isinstance(m, ScriptModule))
        # What has divided parameters over ranks puts others in their place, and takes them back.
        return cls(own, not any(map(is_sharded, found)))


class Attributes:
    """Attributes, parameters and buffers of modules at the start of a call.

    Values are kept as they are, small tensors as copies, lists, dicts and sets with what is in
    them. Of large tensors it is noted how often they had been written to.

    Args:
        name: Of the block, for messages.
        owners: The modules, and what of them is put back.
    """

    def __init__(self, name: str, owners: Owners) -> None:
        self.name, self.parameters = name, owners.parameters
        self._kept = [
            _Kept(owner, *found)
            for owner in owners.modules
            for found in _containers(owner, owners.parameters)
        ]

    def changed(self) -> set[Place]:
        """Tensors that are others now, or have been written to."""
        return {(kept.owner, key) for kept in self._kept for key in kept.changed()}

    @contextmanager
    def again(self, known: Collection[Place] = ()) -> Iterator[None]:
        """A context in which all is as it was; afterwards all is as it was before the context.

        Args:
            known: Large tensors that a call changes and does not depend on.

        Raises:
            Unlike: Another large tensor has changed.
        """
        now = [(kept, kept.contents(), kept.trained()) for kept in self._kept]
        put: list[tuple[str, Tensor, int]] = []
        try:
            for kept in self._kept:
                for key, tensor in kept.restore(known, self.name):
                    put.append((key, tensor, version_of(tensor)))
            yield
        finally:
            for kept, contents, trained in now:
                kept.fill(contents, trained)
        for key, tensor, version in put:
            if version_of(tensor) != version:
                raise Unlike(self.name, f"it has written to {key}, as it had not before")


class Unseen:
    """Looks for what a call does and torch does not count.

    These are writes to large tensors, as `tensor.data` makes them, and random numbers of others:
    that two runs came out alike may be luck.

    Args:
        owners: Modules, before a call.
    """

    def __init__(self, owners: Owners) -> None:
        own = [(n, b) for m in owners.modules for n, b in buffers_in(m).items()]
        if owners.parameters:
            own += [(n, p) for m in owners.modules for n, p in parameters_in(m).items()]
        self._copies = [
            (name, tensor, version_of(tensor), tensor.detach().clone())
            for name, tensor in own
            if tensor is not None and not tensor.requires_grad and not is_small(tensor)
        ]
        self._owners, self._drawn = owners, _generators(owners)

    def found(self) -> str:
        """What it has done, in words; nothing if it has not."""
        for name, tensor, version, copy in self._copies:
            if version_of(tensor) == version and not same(tensor, copy):
                return f"it writes to {name} unseen by torch"
        now = _generators(self._owners)
        changed = [name for name, state in self._drawn.items() if now.get(name) != state]
        return f"it draws from {changed[0]}" if changed else ""


def _generators(owners: Owners) -> dict[str, str | bytes]:
    """The states of random generators that a call may draw from, besides torch's own."""
    state: Any = np.random.get_state()
    found: dict[str, str | bytes] = {
        "Python's random numbers": repr(random.getstate()),
        "NumPy's random numbers": state[1].tobytes() + str(state[2]).encode(),
    }
    for owner in owners.modules:
        for key in vars(owner).keys() - _TORCHS:
            match vars(owner)[key]:
                case torch.Generator() as own:
                    found[key] = own.get_state().numpy().tobytes()
                case np.random.Generator() as own:
                    found[key] = repr(own.bit_generator.state)
                case random.Random() as own:
                    found[key] = repr(own.getstate())
    return found


class _Kept:
    """A dict, list or set of a module.

    Args:
        owner: The module.
        where: It.
        strong: Whether large tensors in it are kept alive.
        parameters: Whether it holds parameters. Default: False.
    """

    def __init__(
        self, owner: nn.Module, where: Any, strong: bool, parameters: bool = False
    ) -> None:
        self.owner, self.where, self.parameters = owner, where, parameters
        self.copies: list[tuple[str, Tensor]] = []
        self.large: dict[str, tuple[Callable[[], Tensor | None], int]] = {}
        self.then, self.then_trained = self.contents(), self.trained()
        if not isinstance(where, dict):
            return
        for key in where.keys() - _TORCHS:
            value = where[key]
            if not isinstance(value, Tensor):
                continue
            if is_small(value) and not isinstance(value, nn.Parameter):
                # With its graph, an attribute that was set in the last step would keep that step.
                self.copies.append((key, _copy(value)))
                self.then[key] = None
            elif strong:
                self.large[key] = partial(_given, value), version_of(value)
            else:
                self.large[key] = weakref.ref(value), version_of(value)
                self.then[key] = None

    def contents(self) -> Any:
        return self.where.copy()

    def trained(self) -> list[tuple[nn.Parameter, bool]]:
        if not self.parameters:
            return []
        found = self.where.values()
        return [(p, p.requires_grad) for p in found if isinstance(p, nn.Parameter)]

    def fill(self, contents: Any, trained: list[tuple[nn.Parameter, bool]]) -> None:
        for parameter, wants in trained:
            if parameter.requires_grad != wants:
                parameter.requires_grad_(wants)
        if isinstance(self.where, list):
            self.where[:] = contents
        else:
            self.where.clear()
            self.where.update(contents)

    def changed(self) -> Iterator[str]:
        if not isinstance(self.where, dict):
            return
        for key, value in self.where.items():
            if isinstance(value, Tensor) and key not in _TORCHS:
                then, version = self.large.get(key, (_nothing, 0))
                if then() is not value or version_of(value) != version:
                    yield key

    def restore(self, known: Collection[Place], name: str) -> list[tuple[str, Tensor]]:
        """Put back what was there; large tensors that must not be written to are returned."""
        contents, put = self.then.copy(), []
        for key, copy in self.copies:
            contents[key] = _copy(copy)
        for key, (then, version) in self.large.items():
            tensor, now = then(), self.where.get(key)
            if tensor is not None and version_of(tensor) == version:
                contents[key] = tensor
                put.append((key, tensor))
            elif (self.owner, key) not in known:
                raise Unlike(name, f"{key} has changed in between")
            else:
                # What it writes there counts once.
                contents[key] = tensor.clone() if tensor is not None and now is tensor else now
        self.fill(contents, self.then_trained)
        return put


def _containers(owner: nn.Module, parameters: bool) -> Iterator[tuple[Any, ...]]:
    own = vars(owner)
    yield own, False
    yield buffers_in(owner), True
    if parameters:
        yield parameters_in(owner), True, True
    for key in own.keys() - _TORCHS:
        if type(own[key]) in (list, dict, set):
            yield own[key], True


def is_small(tensor: Tensor) -> bool:
    """Whether a tensor is copied, as it may be written to, rather than watched.

    Args:
        tensor: That belongs to a module.
    """
    return tensor.numel() <= _SMALL


def _given(tensor: Tensor) -> Tensor:
    return tensor


def _nothing() -> None:
    return None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
