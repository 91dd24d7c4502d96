"""A call of a layer as a function of arrays, which tensorflow and jax can run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope

from keras_ext.backends.call_state import CallState, raw_values, state_of


@dataclass
class Result:
    """What a call has made.

    Args:
        leaves: Of what it returns.
        masks: Of these, where they have some.
        losses: That layers have added.
        changed: New values of variables that it has assigned, by place in the state.
    """

    leaves: list[Any]
    masks: list[Any]
    losses: list[Any]
    changed: dict[int, Any]

    def differentiable(self) -> list[Any]:
        """What gradients come from."""
        return [leaf for leaf in self.leaves if is_float(leaf)] + self.losses


class PureCall:
    """A call that gets all that it depends on, and changes nothing.

    Args:
        layer: That is called.
        call: What it does.
        args: That it gets.
        kwargs: Others.

    Attributes:
        inputs: What gradients flow to: arrays of floats that it gets, and what it trains.
        state: Values that it reads and may assign.
    """

    def __init__(
        self,
        layer: keras.Layer,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._layer, self._call, self._arguments = layer, call, (args, kwargs)
        self._flat = keras.tree.flatten(self._arguments)
        self._around = CallState(self._flat)
        self._places = [i for i, x in enumerate(self._flat) if is_float(x)]
        self._trained = layer.trainable_variables
        self._state = state_of(layer)
        self.inputs = [self._flat[i] for i in self._places] + raw_values(self._trained)
        self.state = raw_values(self._state)
        # On jax, variables have values in the scope alone, and those that are frozen, or belong to
        # other layers, do not change.
        around = get_stateless_scope()
        self._others = {} if around is None else dict(around.state_mapping)
        self._structure: Any = None

    def __call__(self, inputs: Sequence[Any], state: Sequence[Any]) -> Result:
        """Call it with other values for `inputs` and `state`."""
        flat, count = list(self._flat), len(self._places)
        for i, value in zip(self._places, inputs[:count], strict=True):
            flat[i] = value
        self._around.mark(flat)
        args, kwargs = keras.tree.pack_sequence_as(self._arguments, flat)
        variables = [*self._trained, *self._state]
        scope = keras.StatelessScope(
            zip(variables, [*inputs[count:], *state], strict=True),
            collect_losses=True,
            initialize_variables=False,
        )
        scope.state_mapping = self._others | scope.state_mapping
        before = dict(scope.state_mapping)
        with self._around.restored(), scope:
            self._structure = self._call(*args, **kwargs)
        leaves = keras.tree.flatten(self._structure)
        changed = {k: new for k, new in scope.state_mapping.items() if new is not before.get(k)}
        places = {id(variable): i for i, variable in enumerate(self._state)}
        if not changed.keys() <= places.keys():
            raise ValueError("it assigns to variables that are trained, or that others have")
        return Result(
            leaves,
            [get_keras_mask(x) if keras.ops.is_tensor(x) else None for x in leaves],
            list(scope.losses),
            {places[key]: new for key, new in changed.items()},
        )

    def finish(self, result: Result) -> Any:
        """Do to the layer what a call would have done, and return what it would have returned."""
        for leaf, mask in zip(result.leaves, result.masks, strict=True):
            if mask is not None and get_keras_mask(leaf) is None:
                set_keras_mask(leaf, mask)
        if result.losses:
            # That of a model refuses.
            keras.Layer.add_loss(self._layer, result.losses)
        for i, value in result.changed.items():
            self._state[i].assign(value)
        return keras.tree.pack_sequence_as(self._structure, result.leaves)


def is_float(x: Any) -> bool:
    """Whether something is an array of floats."""
    return keras.ops.is_tensor(x) and keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(x.dtype)
    )
