"""A block that is called twice at once on torch, to see whether it may be called again later.

Keras variables are taken care of wherever a block is called again. What else a call leaves behind
would count twice: counters, buffers of torch, random numbers of others.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import keras
import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from keras_ext._units import parts_of
from keras_ext.backends.call_state import raw_values, state_of
from keras_ext.backends.internals import bookkeeping

# What torch itself keeps in a module: layers and hooks do not change within a step.
_TORCHS = frozenset(vars(nn.Module())) - {"_buffers"}
# Elements of a tensor or array that is copied, as a write to it may not be counted.
_SMALL = 2**14
# How deep attributes of attributes are looked at.
_DEPTH = 5
_PYTHON = "Python's random numbers"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_NOT_ENTERED = (keras.Variable, nn.Module, nn.Parameter, type, ModuleType)
_OF_OTHERS = sys.stdlib_module_names | {"keras", "numpy", "torch"}
Shape = tuple[torch.Size, torch.dtype]


class Trial:
    """What is around a call that is about to be made, so that it can be judged.

    Args:
        layer: The block.
        args: That it gets, flat.
    """

    def __init__(self, layer: keras.Layer, args: Sequence[Any]) -> None:
        self._layer = layer
        self._state = set(map(id, state_of(layer)))
        trained = [v for v in layer.variables if id(v) not in self._state]
        self._taken = [x for x in args if isinstance(x, torch.Tensor)]
        self._fixed = [("what it takes", x, x._version) for x in self._taken]
        for variable, value in zip(trained, raw_values(trained), strict=True):
            self._fixed.append((f"{variable.path}, which is trained", value, value._version))
        self._own = _Own(layer)
        self._random = torch.get_rng_state(), get_device_states(*self._taken)

    def why_not(self, output: Any, saved: list[Shape], again: Callable[[], Any]) -> str:
        """Call the block again, unless it is seen at once that this must not be.

        Args:
            output: What it has returned.
            saved: Shapes of what it has saved for the backward pass, in order.
            again: Calls it.

        Returns:
            Why it cannot be called again later, nothing if it can.
        """
        after = _Own(self._layer)
        # A generator of Keras that is made takes its seed from Python, once.
        seeded = len(state_of(self._layer)) > len(self._state)
        for name, tensor, version in self._fixed:
            if tensor._version != version:
                return f"it assigns to {name}"
        if why := self._own.written(after, seeded):
            return why
        found: list[Shape] = []
        drawn = torch.get_rng_state(), get_device_states(*self._taken)
        try:
            self._draw_from(self._random)
            with saved_tensors_hooks(lambda x: found.append((x.shape, x.dtype)), _never):
                repeated = again()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"called twice, it raises {type(error).__name__}: {error}".partition("\n")[0]
        finally:
            self._draw_from(drawn)
            now = _Own(self._layer)
            after.put_back()
        if changed := after.differs(now):
            return f"it changes {changed}"
        if found != saved or not _alike(output, repeated):
            return "called twice, it does not give the same"
        return ""

    def _draw_from(self, state: tuple[torch.Tensor, tuple[list[int], list[Any]]]) -> None:
        torch.set_rng_state(state[0])
        set_device_states(*state[1])


class _Own:
    """What a layer and those inside it have of their own, as it is now.

    Args:
        layer: With its layers.
    """

    def __init__(self, layer: keras.Layer) -> None:
        self._values: dict[str, Any] = {}
        self._containers: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        generator: Any = np.random.get_state()
        self._random: dict[str, Any] = {
            _PYTHON: random.getstate(),
            "NumPy's random numbers": (generator[1].tobytes(), *generator[2:]),
        }
        for part in parts_of(layer):
            for module in part.modules():
                name = getattr(module, "name", type(module).__name__)
                self._look(str(name), _attributes(module), vars(module), 0)

    def written(self, now: _Own, seeded: bool) -> str:
        """What has been written to or drawn from since, in words.

        Args:
            now: How it is now.
            seeded: Whether a generator of Keras was made since.
        """
        for name, state in self._random.items():
            if now._random.get(name) != state and not (seeded and name == _PYTHON):
                return f"it draws from {name}"
        for name, value in self._values.items():
            other = now._values.get(name)
            if isinstance(value, _Array) and value.written(other):
                return f"it writes to {name}"
        return ""

    def differs(self, now: _Own) -> str:
        """The first attribute that has another value, arrays aside."""
        for name in sorted(self._values.keys() | now._values.keys()):
            before, after = self._values.get(name), now._values.get(name)
            if not isinstance(after, _Array) and before != after:
                return name
        return ""

    def put_back(self) -> None:
        """Put attributes back, and what is in lists, dicts and sets."""
        for container, contents in self._containers:
            if isinstance(container, dict):
                container.update({k: v for k, v in contents.items() if container.get(k) is not v})
                for key in container.keys() - contents.keys():
                    del container[key]
            elif isinstance(container, set):
                container.intersection_update(contents)
                container.update(contents)
            elif list(map(id, container)) != list(map(id, contents)):
                container.clear()
                container.extend(contents)

    def _look(self, name: str, items: dict[Any, Any], container: Any, depth: int) -> None:
        if id(container) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(container))
        if isinstance(container, (dict, list, set, deque)):
            self._containers.append((container, container.copy()))
        for key, value in items.items():
            self._note(f"{name}.{key}".replace("._buffers", ""), value, depth + 1)

    def _note(self, name: str, value: Any, depth: int) -> None:
        match value:
            case torch.Tensor() if not isinstance(value, nn.Parameter):
                self._values[name] = _Array(value, value.detach(), value._version)
            case np.ndarray() if value.dtype.kind in "biufc":
                self._values[name] = _Array(value, torch.from_numpy(value))
            case torch.Generator():
                self._random[name] = value.get_state().numpy().tobytes()
            case np.random.Generator():
                self._random[name] = repr(value.bit_generator.state)
            case random.Random():
                self._random[name] = value.getstate()
            case _ if isinstance(value, _PLAIN):
                self._values[name] = type(value), repr(value)
            case dict():
                self._values[name] = len(value)
                self._look(name, value, value, depth)
            case list() | tuple() | set() | frozenset() | deque():
                self._values[name] = len(value)
                self._look(name, dict(enumerate(value)), value, depth)
            case Iterator():
                self._random[name] = object()  # nobody knows where it stands
            case _ if hasattr(value, "__dict__") and not isinstance(value, _NOT_ENTERED):
                if type(value).__module__.partition(".")[0] not in _OF_OTHERS:
                    self._look(name, vars(value), vars(value), depth)


class _Array:
    """An array that a layer holds.

    Args:
        value: It.
        tensor: The same in memory.
        version: How often it was written to, as far as that is counted. Default: not at all.
    """

    def __init__(self, value: Any, tensor: torch.Tensor, version: int = 0) -> None:
        self._value, self._tensor, self._version = value, tensor, version
        self._copy = tensor.clone() if tensor.numel() <= _SMALL else None

    def written(self, now: Any) -> bool:
        """Whether it is the same array with other values."""
        if not isinstance(now, _Array) or now._value is not self._value:
            return False
        if self._copy is not None and not _same(self._copy, self._tensor):
            return True
        return now._version != self._version


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Those that neither torch nor Keras has put there."""
    hidden = _TORCHS | (bookkeeping() - {"_buffers"} if isinstance(module, keras.Layer) else set())
    return {key: value for key, value in vars(module).items() if key not in hidden}


def _alike(found: Any, expected: Any) -> bool:
    pair = keras.tree.flatten(found), keras.tree.flatten(expected)
    return len(pair[0]) == len(pair[1]) and all(map(_same, *pair))


def _same(found: Any, expected: Any) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return type(found) is type(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(found, expected) or (
        found.is_floating_point() and torch.allclose(found, expected, 0, 0, equal_nan=True)
    )


def _never(_: Any) -> Any:
    raise RuntimeError("it asks for gradients while it runs")
