"""A training step that can be run once more after it ran out of memory."""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ext._compat import LightningModule
from lightning_ext.recompute.state import random_state, set_random_state


class Attempts:
    """Runs steps of a module; a step that failed leaves no trace when it is run again.

    Random numbers, buffers and gradients are as before, and what `self.log` has got already it
    does not get again.

    Args:
        module: Whose steps they are.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self._buffers: list[Tensor] | None = None  # that steps write to; all before the first

    def run(
        self, step: Callable[[], Any], again: Callable[[], bool], accumulates: bool = False
    ) -> Any:
        """Run a step, and run it again as long as it is out of memory and somebody has an idea.

        Args:
            step: Forward and backward pass.
            again: Called when it is out of memory; makes room and says whether it did.
            accumulates: Whether gradients are added to those that are there. Default: False.

        Returns:
            What the step returns.

        Raises:
            torch.OutOfMemoryError: It was out of memory and `again` said no.
        """
        devices = sorted({p.get_device() for p in self.module.parameters() if p.is_cuda})
        random, buffers = random_state(devices), self._copied_buffers()
        aside = self._take_gradients() if accumulates else []
        logged = Counter[str]()
        while True:
            try:
                with _Logging(self.module, logged):
                    result = step()
                break
            except torch.OutOfMemoryError as error:
                if not again():
                    _add_gradients(aside)
                    raise
                # The frames of the failed step hold its graph.
                traceback.clear_frames(error.__traceback__)
            set_random_state(random)
            with torch.no_grad():
                for buffer, copy in buffers:
                    buffer.copy_(copy)
            for p in self.module.parameters():
                p.grad = None
            gc.collect()
            if devices:
                torch.cuda.empty_cache()
        if self._buffers is None:
            self._buffers = [b for b, copy in buffers if not torch.equal(b, copy)]
        _add_gradients(aside)
        return result

    def _copied_buffers(self) -> list[tuple[Tensor, Tensor]]:
        found = self.module.buffers() if self._buffers is None else self._buffers
        return [(b, b.detach().clone()) for b in found]

    def _take_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        found = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
        for p, _ in found:
            p.grad = None
        return found


def _add_gradients(aside: list[tuple[nn.Parameter, Tensor]]) -> None:
    for p, gradient in aside:
        p.grad = gradient if p.grad is None else gradient.add_(p.grad)
    aside.clear()


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
        log, left = self.module.log, self.before

        def recorded(name: str, *args: Any, **kwargs: Any) -> None:
            if left[name]:
                left[name] -= 1
                return
            log(name, *args, **kwargs)
            self.logged[name] += 1

        self.module.log = recorded  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        if self.own is None:
            del self.module.log
        else:
            self.module.log = self.own  # type: ignore[method-assign]
