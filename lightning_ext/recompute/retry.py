"""A training step that can be run once more after it has failed."""

from __future__ import annotations

import copy
import gc
import traceback
from collections import Counter
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ext._compat import LightningModule
from lightning_ext._torch import buffers_in, parameters_in, version_of
from lightning_ext.recompute.attributes import Place, Unlike, is_small
from lightning_ext.recompute.state import random_state, set_random_state
from lightning_ext.recompute.tensors import DEPTH, same, tensors_in


class Attempts:
    """Runs steps of a module; a step that failed leaves no trace when it is run again.

    Random numbers, buffers, modes of layers, what is trained, and gradients are as before, and
    what `self.log` has got already it does not get again.

    Args:
        module: Whose steps they are.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self._modules = [*module.modules()]
        self._written: set[Place] | None = None  # large buffers that steps write to; not known yet

    def run(
        self,
        step: Callable[[], Any],
        again: Callable[[RuntimeError], bool],
        accumulates: bool = False,
    ) -> Any:
        """Run a step, and run it again as long as it fails and somebody has an idea.

        It fails when it is out of memory, or when a block cannot be run again as it was run.

        Args:
            step: Forward and backward pass.
            again: Called when it has failed; does something about it and says whether it did.
            accumulates: Whether gradients are added to those that are there. Default: False.

        Returns:
            What the step returns.

        Raises:
            torch.OutOfMemoryError: It was out of memory and `again` said no.
            Unlike: A block cannot be run again as it was run and `again` said no.
        """
        devices = sorted({p.get_device() for p in self.module.parameters() if p.is_cuda})
        random, before = random_state(devices), _Before(self._modules, self._written)
        aside = self._take_gradients() if accumulates else []
        logged = Counter[str]()
        while True:
            try:
                with _Logging(self.module, logged):
                    result = step()
                break
            except (torch.OutOfMemoryError, Unlike) as error:
                # What steps have never written to before is not kept.
                if not before.is_kept() or not again(error):
                    _add_gradients(aside)
                    raise
                # The frames of the failed step hold its graph.
                traceback.clear_frames(error.__traceback__)
            set_random_state(random)
            before.put_back()
            for p in self.module.parameters():
                p.grad = None
            gc.collect()
            if devices:
                torch.cuda.empty_cache()
        self._written = before.written() | (
            before.differ() if self._written is None else self._written
        )
        _add_gradients(aside)
        return result

    def _take_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        found = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
        for p, _ in found:
            p.grad = None
        return found


def _add_gradients(aside: list[tuple[nn.Parameter, Tensor]]) -> None:
    for p, gradient in aside:
        p.grad = gradient if p.grad is None else gradient.add_(p.grad)
    aside.clear()


class _Before:
    """Modules before a step.

    Args:
        modules: All.
        written: Buffers that steps write to; small ones may always be. Default: None, all may.
    """

    def __init__(self, modules: Sequence[nn.Module], written: Collection[Place] | None) -> None:
        self._modes = [(m, m.training) for m in modules]
        self._trained = [
            (p, p.requires_grad)
            for m in modules
            for p in parameters_in(m).values()
            if p is not None
        ]
        self._buffers = [(m, dict(buffers_in(m))) for m in modules if buffers_in(m)]
        found = [(m, n, b) for m, own in self._buffers for n, b in own.items() if b is not None]
        self._versions = [(m, name, b, version_of(b)) for m, name, b in found]
        self._copies = {
            (m, name): b.detach().clone()
            for m, name, b in found
            if written is None or is_small(b) or (m, name) in written
        }

    def written(self) -> set[Place]:
        """Buffers that have been written to in place since."""
        return {(m, name) for m, name, b, version in self._versions if version_of(b) != version}

    def differ(self) -> set[Place]:
        """Copied buffers that are different; some operators of torch write without counting it."""
        return {
            (m, name)
            for m, name, b, _ in self._versions
            if (m, name) in self._copies and not same(b, self._copies[m, name])
        }

    def is_kept(self) -> bool:
        """Whether all that has been written to can be put back."""
        return self.written() <= self._copies.keys()

    def put_back(self) -> None:
        """Make all as it was."""
        for module, mode in self._modes:
            module.training = mode
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
        for module, own in self._buffers:
            buffers_in(module).update(own)
        with torch.no_grad():
            for module, name, buffer, _ in self._versions:
                if (module, name) in self._copies:
                    buffer.copy_(self._copies[module, name])


class _Logging:
    """While it is open, what earlier attempts have logged is not logged again.

    Args:
        module: That logs.
        logged: How often each name was logged by earlier attempts.
    """

    def __init__(self, module: LightningModule, logged: Counter[str]) -> None:
        self.module, self.logged, self.before = module, logged, logged.copy()

    def __enter__(self) -> None:
        self.own = vars(self.module).get("log")
        recorder = _Recorder(self.module, self.module.log, self.before, self.logged)
        self.module.log = recorder  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        if self.own is None:
            del self.module.log
        else:
            self.module.log = self.own  # type: ignore[method-assign]


@dataclass
class _Recorder:
    """Stands for `self.log`.

    Args:
        module: That logs.
        log: Its method.
        left: How often each name is not to be logged again.
        logged: How often it was logged.
    """

    module: LightningModule
    log: Callable[..., None]
    left: Counter[str]
    logged: Counter[str]

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Log what was not logged yet."""
        if self.left[name]:
            self.left[name] -= 1
            return
        self.log(name, *args, **kwargs)
        self.logged[name] += 1

    def __reduce__(self) -> Any:
        return getattr, (self.module, "log")  # copies of the module have their own


class Batch:
    """A batch before a step, which may take things out of it or write to it.

    Args:
        batch: Any object.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._then = copy.copy(batch) if isinstance(batch, (list, MutableMapping)) else batch
        self._tensors = [(t, version_of(t)) for t in tensors_in(batch, DEPTH)]

    def put_back(self) -> bool:
        """Put back what was taken out, and say whether that makes it as it was."""
        if isinstance(self._batch, list):
            self._batch[:] = self._then
        elif isinstance(self._batch, MutableMapping):
            self._batch.clear()
            self._batch.update(self._then)
        now = tensors_in(self._batch, DEPTH)
        return len(now) == len(self._tensors) and all(
            tensor is then and version_of(tensor) == version
            for tensor, (then, version) in zip(now, self._tensors, strict=True)
        )
