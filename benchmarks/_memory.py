"""Memory that torch has taken since a moment, counted at every operator."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Counts the memory of all tensors that operators return.

    `now` and `highest` are bytes since the context was entered, `largest` those of one tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.highest = self.largest = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and look at what it returns."""
        output = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if _is(t)}
        for tensor in filter(_is, tree_leaves(output)):
            self._add(tensor.untyped_storage(), given)
        return output

    def _add(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        known = self._known.get(id(storage))
        if id(storage) in given or (known is not None and known() is storage):
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.now -= size

        self._known[id(storage)] = weakref.ref(storage, gone)
        self.now += size
        self.largest = max(self.largest, size)
        self.highest = max(self.highest, self.now)


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)
