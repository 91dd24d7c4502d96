"""What modules outside of blocks cost, so that shares are those of a whole step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from lightning_ext._torch import is_compiled, is_compiled_in_place, is_transforming
from lightning_ext.recompute.hooks import Hook
from lightning_ext.recompute.tensors import first_of
from lightning_ext.recompute.units import is_sharded
from lightning_ext.recompute.work import Work, estimate


class Outside:
    """Counts operations of modules outside of blocks while a forward pass runs.

    Blocks are counted, too, where they are called and not measured by themselves, as inside of
    checkpoints. What `training_step` does without a module is not counted.

    Args:
        model: With its blocks.
        units: The blocks.
        counts: Whether a forward pass runs, and no block that is measured.
    """

    def __init__(
        self, model: nn.Module, units: Collection[nn.Module], counts: Callable[[], bool]
    ) -> None:
        self.cost = 0.0
        self.known = True  # whether all of them can be counted
        self._counts = counts
        compiled = (m for m in model.modules() if is_compiled(m) or is_compiled_in_place(m))
        self._modules = [*self._found(model, {*units, *compiled})]
        self._open: tuple[nn.Module, Work | None] | None = None

    def attach(self) -> list[RemovableHandle]:
        """Let the modules tell when they begin and end."""
        before, after = Hook(self._before), Hook(self._after)
        handles = []
        for module in self._modules:
            handles.append(module.register_forward_pre_hook(before))
            handles.append(module.register_forward_hook(after, prepend=True, always_call=True))
        return handles

    def _found(self, module: nn.Module, apart: set[nn.Module]) -> Iterator[nn.Module]:
        if isinstance(module, ScriptModule) or is_compiled_in_place(module):  # takes no hooks
            self.known &= next(module.parameters(), None) is None
        elif module in apart:
            yield module
        else:
            if apart.isdisjoint(module.modules()):
                yield module
            for child in module.children():
                yield from self._found(child, apart)

    def _before(self, module: nn.Module, args: Any) -> None:
        if self._open is not None or not self._counts():
            return
        if not torch.is_grad_enabled() or is_transforming():
            return
        work = None
        # Operators in compiled code cannot be counted; pieces would have to be gathered first.
        if is_compiled(module) or any(map(is_sharded, module.modules())):
            first = args[0] if args and isinstance(args[0], Tensor) else first_of(args)
            self.cost += estimate(module, first)
        else:
            work = Work()
            work.__enter__()
        self._open = module, work

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open is None or self._open[0] is not module:
            return
        (_, work), self._open = self._open, None
        if work is not None:
            work.__exit__(None, None, None)
            self.cost += work.cost
