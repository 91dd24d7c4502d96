"""Operations that torch runs, counted as it runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ext._torch import operations
from lightning_ext.recompute.tensors import memory_of, tensors_in

# Writing an element takes as long as this many operations of a matrix product, about.
_ELEMENT = 16
_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")
_PRODUCT = ("aten::bmm", "aten::baddbmm")


class Work(TorchDispatchMode):
    """Counts operations, and notes weights of attention that was written by hand.

    `flops` are those of matrix products and convolutions, `elements` what other operators return,
    `weights` addresses of what comes from a softmax and goes into a product of matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.elements = 0
        self.weights: set[int] = set()
        self._softmax: dict[int, set[int]] = {}  # by address, what it was made of

    @property
    def cost(self) -> float:
        """Of all of it, in operations."""
        return float(self.flops + _ELEMENT * self.elements)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is counted."""
        before = self.flops, self.elements
        try:
            yield
        finally:
            self.flops, self.elements = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and look at it."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        flops = operations(func, args, kwargs, output)
        if flops is not None:
            self.flops += flops
        elif not func.is_view:
            self.elements += sum(t.numel() for t in tensors_in(output))
        self._look(func.name().split(".")[0], args, output)
        return output

    def _look(self, name: str, args: Any, output: Any) -> None:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None:
            return
        source = self._softmax.get(memory_of(first)[0], set())
        if name in _PRODUCT:
            self.weights |= source
        elif name in _SOFTMAX or (source and isinstance(output, Tensor)):
            for tensor in tensors_in(output):
                address = memory_of(tensor)[0]
                self._softmax[address] = source | {address}


def estimate(module: nn.Module, first: Tensor | None) -> float:
    """Operations of a module, as if each row of its input were multiplied by all parameters.

    Args:
        module: That cannot be counted.
        first: Its first argument.
    """
    rows = 1 if first is None or not first.ndim else first.numel() / max(first.shape[-1], 1)
    return 2.0 * rows * sum(p.numel() for p in module.parameters())
