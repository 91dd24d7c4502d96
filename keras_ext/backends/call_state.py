"""What stands around a call of a layer, so that it can be called again later.

A layer takes from its surroundings whether it trains, to which precision it casts variables, and
the masks of its inputs. By the time of the backward pass they are gone, and a layer that is called
again without them computes something else.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
from keras.src.backend import AutocastScope, get_autocast_scope, get_keras_mask, set_keras_mask
from keras.src.backend.common import global_state

from keras_ext._units import parts_of
from keras_ext.backends.internals import own_variables

CONTEXT = "current_call_ctx"


class CallState:
    """The surroundings of a call that is about to be made.

    Args:
        inputs: Tensors that the layer gets, or anything else, which is passed over.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        # Later layers of the same call write into the context.
        self._context = copy.copy(global_state.get_global_attribute(CONTEXT))
        self._autocast = get_autocast_scope()
        self._masks = [get_keras_mask(x) if keras.ops.is_tensor(x) else None for x in inputs]

    def mark(self, inputs: Sequence[Any]) -> None:
        """Give tensors that stand for the inputs the masks of these."""
        for x, mask in zip(inputs, self._masks, strict=True):
            if mask is not None and get_keras_mask(x) is None:
                set_keras_mask(x, mask)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context with the same surroundings."""
        before = global_state.get_global_attribute(CONTEXT)
        with ExitStack() as stack:
            scope = self._autocast
            stack.enter_context(AutocastScope(None if scope is None else scope.dtype))
            # A layer that finds no context makes one, and forgets its losses.
            global_state.set_global_attribute(CONTEXT, copy.copy(self._context))
            try:
                yield
            finally:
                global_state.set_global_attribute(CONTEXT, before)


def raw_values(variables: Sequence[keras.Variable]) -> list[Any]:
    """Values of variables as they are kept, whatever the precision around is."""
    with AutocastScope(None):
        return [variable.value for variable in variables]


def state_of(layer: keras.Layer) -> list[keras.Variable]:
    """Variables that a call of a layer may change: statistics, metrics, seeds, the seed for all.

    Args:
        layer: With its layers.
    """
    made = {id(v) for part in parts_of(layer) for v in own_variables(part)}
    found = {id(v): v for v in [*layer.variables, *layer.metrics_variables] if id(v) not in made}
    everybody = global_state.get_global_attribute("global_seed_generator")
    if everybody is not None:
        found.setdefault(id(everybody.state), everybody.state)
    return list(found.values())


class Births:
    """Watches for seeds that a call is the first to ask for.

    Args:
        layer: That is about to be called.
        before: Its `state_of`.
    """

    def __init__(self, layer: keras.Layer, before: Sequence[keras.Variable]) -> None:
        self._layer, self._known = layer, set(map(id, before))
        self._python = random.getstate()

    def seen(self) -> list[tuple[keras.Variable, Any]]:
        """Variables of these seeds, and their values before the call."""
        born = [v for v in state_of(self._layer) if id(v) not in self._known]
        return [(v, keras.ops.convert_to_tensor([self._seed(v), 0], dtype=v.dtype)) for v in born]

    def _seed(self, variable: keras.Variable) -> int:
        everybody = global_state.get_global_attribute("global_seed_generator")
        if everybody is None or variable is not everybody.state:
            return int(variable.value[0])  # beside it is the number of draws
        # That of all is mixed at every draw; Keras took it from Python.
        then = random.Random()
        then.setstate(self._python)
        return then.randint(1, 10**9)
