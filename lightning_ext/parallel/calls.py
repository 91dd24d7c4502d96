"""The user's own steps, with the call of the pipelined module in our hands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_ext._compat import LightningModule


class _Stopped(BaseException):
    """Ends a step at the call of the pipelined module; not for `except Exception` to catch."""


@contextmanager
def _replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    had = name in vars(module)
    before = vars(module).get(name)
    object.__setattr__(module, name, value)
    try:
        yield
    finally:
        if had:
            object.__setattr__(module, name, before)
        else:
            object.__delattr__(module, name)


def inputs_of(
    module: nn.Module, name: str, step: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a step passes to a module, without what comes after the call.

    Raises:
        RuntimeError: The step does not call it.
    """
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        raise _Stopped

    with _replaced(module, "forward", forward):
        try:
            step()
        except _Stopped:
            return seen[0]
    raise RuntimeError(
        f"the step ended without calling {_named(name)}; pass the module that it does call as "
        "pipeline_module=, and note that a step on several ranks cannot skip a batch"
    )


def with_output(module: nn.Module, name: str, output: Any, step: Callable[[], Any]) -> Any:
    """A step in which the call of a module returns `output`.

    Raises:
        RuntimeError: The step calls it more than once.
    """
    calls = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError(
                f"the step calls {_named(name)} more than once, but a pipeline runs it once per "
                "step; put both inputs into one call, for example by concatenating them"
            )
        return output

    with _replaced(module, "forward", forward):
        return step()


class OnStages:
    """Lets the stages answer calls of the pipelined module outside of steps, as for sampling.

    Args:
        name: Of the module.
        run: The stages, with the arguments of a call; all ranks of a copy have to call it.
    """

    def __init__(self, name: str, run: Callable[..., Any] | None) -> None:
        self.name, self.run = name, run

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, None)  # a copy of the module has no other ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module."""
        if self.run is None:
            raise RuntimeError(f"{_named(self.name)} was copied on one of several stages")
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{_named(self.name)} is divided into stages, so that outside of training_step its "
                "output has no gradient; call it under torch.no_grad(), on all ranks with the same "
                "inputs"
            )
        return self.run(args, kwargs)


def plain_backward(root: nn.Module) -> bool:
    """Whether all copies multiply their gradients alike; a `backward` of one's own may not."""
    own = getattr(type(root), "backward", LightningModule.backward)
    return own is LightningModule.backward


def _named(name: str) -> str:
    return f"the pipelined module {name!r}" if name else "the module itself, self(...)"
