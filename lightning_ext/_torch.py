"""The one place with names of torch that are private, or in private modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import graph
from torch.distributed import distributed_c10d
from torch.utils.flop_counter import flop_registry

__all__ = [
    "buffers_in",
    "default_store",
    "has_hooks_of_others",
    "is_checkpointing",
    "is_compiled",
    "is_compiled_in_place",
    "is_of_parameter",
    "is_transforming",
    "operations",
    "parameters_in",
    "transforms_allowed",
    "version_of",
]


def version_of(tensor: Any) -> int:
    """How often a tensor, or one that shares its memory, has been written to.

    Args:
        tensor: Any tensor. Of those made in inference mode torch does not know; 0.
    """
    version: int = 0 if tensor.is_inference() else tensor._version
    return version


def parameters_in(module: Any) -> dict[str, Any]:
    """The dict in which a module keeps its own parameters.

    Args:
        module: A module of torch.
    """
    found: dict[str, Any] = module._parameters
    return found


def buffers_in(module: Any) -> dict[str, Any]:
    """The dict in which a module keeps its own buffers.

    Args:
        module: A module of torch.
    """
    found: dict[str, Any] = module._buffers
    return found


def operations(function: Any, args: Any, kwargs: Any, output: Any) -> int | None:
    """Floating-point operations of a matrix product or convolution; none of other functions.

    Args:
        function: An operator of torch, as a dispatch mode gets it.
        args: That it got.
        kwargs: Others.
        output: What it returned.
    """
    formula = flop_registry.get(function.overloadpacket)
    return None if formula is None else int(formula(*args, **kwargs, out_val=output))


def is_of_parameter(tensor: Any) -> bool:
    """Whether a tensor is a parameter or a view of one.

    Args:
        tensor: Any tensor.
    """
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def is_transforming() -> bool:
    """Whether code runs inside of a transform of `torch.func`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _top() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _is_ours(hooks: Any) -> bool:
    return getattr(hooks[0], "__module__", "").startswith("lightning_ext.")


def has_hooks_of_others() -> bool:
    """Whether what is saved for the backward pass goes to hooks that are not ours."""
    top = _top()
    return top is not None and not _is_ours(top)


def is_checkpointing() -> bool:
    """Whether code runs inside of `torch.utils.checkpoint`, in its forward pass; not reentrant."""
    top = _top()
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


@contextmanager
def transforms_allowed() -> Iterator[None]:
    """A context in which transforms of `torch.func` run where our hooks see what is saved.

    They refuse to where there are any such hooks, so ours are put aside while they run.
    """
    autograd = torch._C._autograd
    disable = graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled(message: str) -> Iterator[None]:
        aside = []
        while (top := _top()) is not None and _is_ours(top):
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


def is_compiled(module: Any) -> bool:
    """Whether a module is what `torch.compile(module)` returns.

    Args:
        module: Any module.
    """
    return hasattr(module, "_orig_mod")


def is_compiled_in_place(module: Any) -> bool:
    """Whether calls of a module run code that `module.compile()` or Lightning has compiled.

    Args:
        module: Any module.
    """
    return bool(
        getattr(module, "_compiled_call_impl", None) or getattr(module, "_compiler_ctx", None)
    )


def default_store() -> Any:
    """The store through which the processes of the default group have found each other."""
    # The public way, a method of the group, is not in all versions of torch that we support.
    return distributed_c10d._get_default_store()
