"""How much memory is held for the backward pass, counted as it is taken and given back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_ext.recompute.tensors import ByMemory, memory_of


class Ledger:
    """Counts the memory of tensors that are held; views of one memory count once.

    Args:
        free: Tensors that count nothing: parameters, buffers, the batch.
    """

    def __init__(self, free: Iterable[Tensor] = ()) -> None:
        self.now = self.peak = 0
        self._known = ByMemory[bool]()
        self._free = list(free)
        for tensor in self._free:
            self._known.set(tensor, True)

    def hold(self, tensor: Tensor) -> int:
        """Count a tensor until its memory is freed.

        Args:
            tensor: That is held by somebody.

        Returns:
            Bytes that it adds to what is counted.
        """
        size = memory_of(tensor)[1]
        if not size or self._known.get(tensor):
            return 0
        self._known.set(tensor, True, lambda _: self._gone(size))
        self.now += size
        self.peak = max(self.peak, self.now)
        return size

    def _gone(self, size: int) -> None:
        self.now -= size


_active: list[Ledger] = []


@contextmanager
def counting(ledger: Ledger) -> Iterator[None]:
    """Let a ledger count what is held from now on."""
    _active.append(ledger)
    try:
        yield
    finally:
        _active.remove(ledger)


def is_counting() -> bool:
    """Whether anybody counts."""
    return bool(_active)


def held(tensor: Tensor) -> None:
    """Tell whoever counts that a tensor is held."""
    for ledger in _active:
        ledger.hold(tensor)


def uncounted(module: nn.Module, batch: Iterable[Tensor]) -> list[Tensor]:
    """Tensors that count nothing, as they are there in any case.

    Args:
        module: With parameters and buffers.
        batch: Tensors of it.
    """
    return [*module.parameters(), *module.buffers(), *batch]
