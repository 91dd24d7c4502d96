"""Give each variable a learning rate of its own within an unmodified optimizer."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
from keras import ops

from keras_ext.backends import internals
from keras_ext.backends.patches import Patches
from keras_ext.backends.supported import innermost


@dataclass(frozen=True)
class VariableRate:
    """What is asked for one variable.

    Args:
        variable: The variable.
        factor: Factor on its learning rate, and so on its decoupled weight decay.
        decays: Whether weight decay acts on it at all. Default: True.
    """

    variable: keras.Variable
    factor: float
    decays: bool = True


class UpdateScaling:
    """Scales the learning rate on its way into the update of each variable.

    Moments, clipping, averaging, accumulation and loss scaling see what they would see without it.

    Args:
        optimizer: Optimizer of a compiled model.
        decide: Asked for the rate of each variable when the model has them, and again when
            one turns up later. It gets the number of optimizer steps done before the fit.

    Raises:
        TypeError: The optimizer cannot have a rate for each variable.
        ValueError: There is no optimizer.
    """

    def __init__(
        self, optimizer: keras.Optimizer, decide: Callable[[int], Sequence[VariableRate]]
    ) -> None:
        self._optimizer = innermost(optimizer)
        self._wrapped = self._optimizer is not optimizer
        self._decide = decide
        self._rates: dict[Any, VariableRate] = {}
        self._patches = Patches()
        self._begin = self.steps
        self._used = False
        self._rate_scale: Callable[[Any], Any] | None = None

    @staticmethod
    def acting_on(optimizer: keras.Optimizer) -> UpdateScaling | None:
        """The scaling that is in force on an optimizer, if any."""
        update_step = vars(innermost(optimizer)).get(internals.UPDATE_STEP)
        scaling = getattr(update_step, "__self__", None)
        return scaling if isinstance(scaling, UpdateScaling) else None

    @property
    def in_force(self) -> bool:
        """Whether it is installed and nobody has removed it."""
        return bool(self._patches)

    def resolve(self) -> None:
        """Ask for the rates now, if that was not done yet."""
        if not self._rates:
            self._ask()

    def _ask(self) -> None:
        # Those outside of the model stay as they are.
        self._rates |= {
            internals.variable_key(self._optimizer, rate.variable): rate
            for rate in self._decide(self._begin)
        }

    def install(self) -> None:
        """Take effect from the next trace of the training step on."""
        optimizer = self._optimizer
        self._update_step = optimizer.update_step
        self._weight_decay = getattr(optimizer, internals.WEIGHT_DECAY)
        self._current_rate = getattr(optimizer, internals.CURRENT_RATE)
        self._patches.set(optimizer, internals.UPDATE_STEP, self.update_step)
        self._patches.set(optimizer, internals.WEIGHT_DECAY, self.apply_weight_decay)
        self._patches.set(optimizer, internals.CURRENT_RATE, self.current_rate)
        if hasattr(optimizer, internals.FUSED_UPDATE_STEP):
            from keras_ext.backends.torch_fused import scale_fused_step

            scaled = scale_fused_step(optimizer, self.factors)
            self._patches.set(optimizer, internals.FUSED_UPDATE_STEP, scaled)

    def remove(self) -> None:
        """Leave the optimizer as it was found."""
        self._patches.undo()

    @property
    def passed_over(self) -> bool:
        """Whether a whole epoch's updates were made past it."""
        # One that accumulates, or looks for its loss scale, may have none to make in that time.
        may_wait = (
            self._wrapped
            or getattr(self._optimizer, "gradient_accumulation_steps", None) is not None
        )
        return not self._used and (not may_wait or self.steps > self._begin)

    def scales(self, optimizer: keras.Optimizer) -> bool:
        """Whether this is the optimizer that it was made for."""
        return innermost(optimizer) is self._optimizer

    def factors(self, variables: Sequence[Any]) -> list[float]:
        """Factor of each variable, in the form in which the optimizer hands it over."""
        self.resolve()
        self._used = True
        return [self._rate_of(variable).factor for variable in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> Any:
        """Stands in for the optimizer's method of this name."""
        (factor,) = self.factors([variable])
        if factor != 1.0:
            if isinstance(self._optimizer, keras.optimizers.Adafactor):
                # It caps its rate itself; a factor that came before the cap would be lost in it.
                step = ops.cast(self._optimizer.iterations + 1, "float32")
                learning_rate = ops.minimum(learning_rate, ops.rsqrt(step))
            learning_rate = learning_rate * factor
        return self._update_step(gradient, variable, learning_rate)

    def apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Stands in for the optimizer's method of this name."""
        self.resolve()
        for group, rate_scale in self._decay_groups(variables):
            self._rate_scale = rate_scale
            try:
                self._weight_decay(group)
            finally:
                self._rate_scale = None

    def current_rate(self) -> Any:
        """Stands in for the optimizer's method that weight decay takes its rate from."""
        rate = self._current_rate()
        return rate if self._rate_scale is None else self._rate_scale(rate)

    def _decay_groups(
        self, variables: Sequence[Any]
    ) -> Iterator[tuple[list[Any], Callable[[Any], Any] | None]]:
        decaying = [variable for variable in variables if self._rate_of(variable).decays]
        if internals.has_fused_weight_decay(self._optimizer) and not self._optimizer.weight_decay:
            return
        if internals.has_fused_weight_decay(self._optimizer):
            from keras_ext.backends.torch_fused import rate_scale

            # The fused decay cannot do with an empty list.
            decaying = [v for v in decaying if internals.takes_weight_decay(self._optimizer, v)]
            scale = rate_scale([self._rate_of(variable).factor for variable in decaying])
            if scale is not None:
                yield decaying, scale
                return
        groups: dict[float, list[Any]] = {}
        for variable in decaying:
            groups.setdefault(self._rate_of(variable).factor, []).append(variable)
        for factor, group in groups.items():
            yield group, None if factor == 1.0 else partial(operator.mul, factor)

    def _rate_of(self, variable: Any) -> VariableRate:
        key = internals.variable_key(self._optimizer, variable)
        if key not in self._rates:
            self._ask()  # a layer was built later than the model
        if key not in self._rates:
            warnings.warn(
                f"the optimizer updates {variable.name!r}, which is no trainable variable of the "
                "model, at the full rate; to count it, make it one, for example by assigning its "
                "layer to an attribute",
                stacklevel=2,
            )
            self._rates[key] = VariableRate(variable, 1.0)
        return self._rates[key]

    @property
    def steps(self) -> int:
        """Updates that the optimizer has made so far."""
        return int(ops.convert_to_numpy(self._optimizer.iterations))
