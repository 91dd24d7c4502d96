"""Hooks on what torch saves for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph


class Saved:
    """What a block saves under a checkpoint, kept until it is known to be fit for one."""

    def __init__(self) -> None:
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._slots: list[_Slot] = []

    def hooks(self) -> graph.saved_tensors_hooks:
        """A context for the call of the block, inside that of the checkpoint."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def save(x: torch.Tensor) -> _Slot:
            self.shapes.append((x.shape, x.dtype))
            self._slots.append(_Slot(x.detach(), pack(x)))
            return self._slots[-1]

        def give(slot: _Slot) -> torch.Tensor:
            return unpack(slot.of_checkpoint) if slot.tensor is None else slot.tensor

        return graph.saved_tensors_hooks(save, give)

    def storages(self) -> dict[int, Any]:
        """Storages of what was saved, by address."""
        return dict(memory(slot.tensor) for slot in self._slots if slot.tensor is not None)

    def drop(self) -> None:
        """Leave it to the checkpoint to make it again."""
        for slot in self._slots:
            slot.tensor = None


class _Slot:
    """A saved tensor, and what the checkpoint has in its place."""

    __slots__ = ("of_checkpoint", "tensor")

    def __init__(self, tensor: torch.Tensor, of_checkpoint: Any) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.of_checkpoint = of_checkpoint


def memory(tensor: torch.Tensor) -> tuple[int, Any]:
    """Address and storage of a tensor, which views share."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage


@contextmanager
def transforms_allowed(tell: Callable[[], None]) -> Iterator[None]:
    """A context in which transforms of `torch.func` run though there are hooks.

    They refuse to, so all hooks are put aside while they run.

    Args:
        tell: Is called when one begins.
    """
    autograd: Any = torch._C._autograd
    disable = graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled(message: str) -> Iterator[None]:
        tell()
        aside: list[Any] = []
        while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
            autograd._pop_saved_tensors_default_hooks()
            aside.append(top)
        try:
            with disable(message):
                yield
        finally:
            for hooks in reversed(aside):
                autograd._push_saved_tensors_default_hooks(*hooks)

    graph.disable_saved_tensors_hooks = disabled  # type: ignore[assignment]
    try:
        yield
    finally:
        graph.disable_saved_tensors_hooks = disable
