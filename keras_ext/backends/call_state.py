"""What stands around a call of a layer, so that it can be called again later.

A layer takes from its surroundings whether it trains, to which precision it casts variables, and
the masks of its inputs. By the time of the backward pass they are gone, and a layer that is called
again without them computes something else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
from keras.src.backend import AutocastScope, get_autocast_scope, get_keras_mask, set_keras_mask
from keras.src.backend.common import global_state

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
    """Variables that a call of a layer may change: statistics, seeds, and the seed for all."""
    found = list(layer.non_trainable_variables)
    everybody = global_state.get_global_attribute("global_seed_generator")
    if everybody is not None and all(v is not everybody.state for v in found):
        found.append(everybody.state)
    return found
