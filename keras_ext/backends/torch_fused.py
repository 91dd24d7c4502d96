"""One learning rate per variable in the optimizers that Keras fuses on torch.

Loaded on the torch backend only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import ops

from keras_ext.backends import internals

# Those that hand the rate, or a product with it, to torch._foreach_mul and use it nowhere else.
_ONE_PASS = {"Adagrad", "Adam", "AdamW", "Adamax", "Lion", "Nadam", "RMSprop"}
_FOREACH = {torch._foreach_mul, torch._foreach_mul_}

FusedStep = Callable[[Sequence[torch.Tensor], Sequence[Any], Any], None]


def scale_fused_step(
    optimizer: Any, factors_of: Callable[[Sequence[Any]], list[float]]
) -> FusedStep:
    """The fused update of an optimizer, with the rate of each variable scaled.

    Args:
        optimizer: A fused optimizer.
        factors_of: Returns the factor of each variable.
    """
    step: FusedStep = getattr(optimizer, internals.FUSED_UPDATE_STEP)

    def one_pass(grads: Sequence[torch.Tensor], variables: Sequence[Any], rate: Any) -> None:
        # The compiler cannot see through the tensor class, and needs no single pass.
        if torch.compiler.is_compiling():
            by_level(grads, variables, rate)
            return
        rates = RatePerTensor.make(rate, factors_of(variables))
        step(grads, variables, rates)
        rates.check_used(optimizer)

    def by_level(grads: Sequence[torch.Tensor], variables: Sequence[Any], rate: Any) -> None:
        state = internals.shared_state(optimizer)
        before = [variable.value.clone() for variable in state]
        rates, members = _levels(rate, factors_of(variables))
        for level_rate, chosen in zip(rates.unbind(), members, strict=True):
            for variable, value in zip(state, before, strict=True):
                variable.assign(value)
            step([grads[i] for i in chosen], [variables[i] for i in chosen], level_rate)

    return one_pass if type(optimizer).__name__ in _ONE_PASS else by_level


def rate_scale(factors: Sequence[float]) -> Callable[[Any], RatePerTensor] | None:
    """What makes of one rate a rate for each tensor; None where the compiler could not follow.

    Args:
        factors: Factor of each tensor.
    """
    if not factors or torch.compiler.is_compiling():
        return None
    return lambda rate: RatePerTensor.make(rate, factors)


def _levels(rate: Any, factors: Sequence[float]) -> tuple[torch.Tensor, list[list[int]]]:
    """Rates that differ, and which of the tensors each is for."""
    members: dict[float, list[int]] = {}
    for i, factor in enumerate(factors):
        members.setdefault(factor, []).append(i)
    base = ops.convert_to_tensor(rate).detach()
    levels = torch.tensor(list(members), dtype=base.dtype, device=base.device)
    return base * levels, list(members.values())


class RatePerTensor(torch.Tensor):
    """A learning rate that is another one for each tensor of a list.

    Calling a fused update once for each rate repeats its scalar work, a fifth of a millisecond, for
    every level. This tensor holds one rate per level. Arithmetic treats it as any tensor, and what
    comes out is such a rate again, until a `torch._foreach` product takes a list of tensors and it:
    then each tensor is multiplied by the rate of its own level.
    """

    _members: Sequence[Sequence[int]]
    _uses: list[str]

    @classmethod
    def make(cls, rate: Any, factors: Sequence[float]) -> RatePerTensor:
        """From a base rate, and the factor of each tensor on it."""
        return cls._with(*_levels(rate, factors), [])

    @classmethod
    def _with(
        cls, rates: torch.Tensor, members: Sequence[Sequence[int]], uses: list[str]
    ) -> RatePerTensor:
        self = rates.as_subclass(cls)
        self._members, self._uses = members, uses
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FOREACH:
                tensors, rates = args
                return rates._apply(func, tensors)
            result = func(*args, **(kwargs or {}))
            like = next(arg for arg in args if isinstance(arg, cls))
            if isinstance(result, torch.Tensor) and result.shape == like.shape:
                return cls._with(result, like._members, like._uses)
            return result

    def _apply(self, func: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        self._uses.append(func.__name__)
        results: list[torch.Tensor | None] = [None] * len(tensors)
        # One call per level: a list of rates would be read back from an accelerator, and wait for
        # all that it has queued.
        for rate, chosen in zip(torch.Tensor.unbind(self), self._members, strict=True):
            part = func([tensors[i] for i in chosen], rate)
            for i, result in zip(chosen, part or (), strict=bool(part)):
                results[i] = result
        return results

    def check_used(self, optimizer: Any) -> None:
        """Make sure that the rates reached the update.

        Raises:
            NotImplementedError: They did not.
        """
        if not self._uses:
            raise NotImplementedError(
                f"this version of Keras updates {type(optimizer).__name__} in a way that cannot "
                "have a rate for each variable; please report it"
            )
