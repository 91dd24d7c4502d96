"""Every private name of Keras that this room reads; `test_internals.py` checks them.

They are used where Keras has no public way: a layer's own variables without its sub-layers', the
calls that make up a functional model, the hooks and the schedule of an optimizer. `siblings` reads
public names only, but of the functions that are running.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import keras

# Hooks of an optimizer that are overridden per instance; see `update_scaling`.
UPDATE_STEP = "update_step"  # public, but for the fused torch optimizers, which skip it
FUSED_UPDATE_STEP = "_parallel_update_step"
WEIGHT_DECAY = "_apply_weight_decay"
CURRENT_RATE = "_get_current_learning_rate"
# Where a callback keeps the model that `set_model` gave it.
CALLBACK_MODEL = "_model"


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Variables that a layer made for training, frozen since or not, without its sub-layers'."""
    return list(layer._trainable_variables)


def sublayers(layer: keras.Layer) -> list[keras.Layer]:
    """Layers directly below a layer, in the order in which it got them."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def is_rematerialized(layer: keras.Layer) -> bool:
    """Whether Keras may run a layer again by itself, as it was made under a `RematScope`."""
    return getattr(layer, "_remat_mode", None) is not None


def layer_lists(layer: keras.Layer) -> dict[str, Any]:
    """Lists and dicts that a layer holds as attributes, by attribute name."""
    return {
        name: value
        for name, value in vars(layer).items()
        if isinstance(value, (list, tuple, Mapping)) and name not in bookkeeping()
    }


@cache
def bookkeeping() -> frozenset[str]:
    """Names of attributes that Keras and the backend give to every layer that has a sub-layer."""
    layer = keras.layers.Layer()
    layer.inner = keras.layers.Layer()
    return frozenset(vars(layer)) - {"inner"}


def is_functional(layer: keras.Layer) -> bool:
    """Whether a layer is a model made from symbolic inputs and outputs."""
    return isinstance(layer, keras.Model) and hasattr(layer, "_nodes_by_depth")


def calls(model: keras.Model) -> Iterator[Any]:
    """Calls of a functional model's layers and operations, from the inputs to the outputs."""
    order = {id(operation): i for i, operation in enumerate(model.operations)}
    for _, nodes in sorted(model._nodes_by_depth.items(), reverse=True):
        yield from sorted(nodes, key=lambda node: order[id(node.operation)])


def variable_key(optimizer: keras.Optimizer, variable: Any) -> Any:
    """Identity under which an optimizer knows a variable, Keras' own or the backend's."""
    return optimizer._var_key(variable)


def takes_weight_decay(optimizer: keras.Optimizer, variable: Any) -> bool:
    """Whether the user left a variable in the optimizer's weight decay."""
    return bool(optimizer._use_weight_decay(variable))


def shared_state(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """State that a fused update advances once per call, whatever variables it is given."""
    return [optimizer._u_product] if isinstance(optimizer, keras.optimizers.Nadam) else []


def has_fused_weight_decay(optimizer: keras.Optimizer) -> bool:
    """Whether weight decay goes over all variables at once, as on torch."""
    return keras.backend.backend() == "torch" and (
        type(optimizer)._apply_weight_decay is keras.Optimizer._apply_weight_decay
    )


def schedule_of(optimizer: Any) -> Any:
    """The schedule that sets an optimizer's learning rate, None where the rate is a number."""
    rate = getattr(optimizer, "_learning_rate", None)
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def schedule_steps(optimizer: Any) -> int | None:
    """Steps made, as a schedule counts them: those that only accumulate gradients as well."""
    steps = getattr(optimizer, "_iterations", None)
    return None if steps is None else int(keras.ops.convert_to_numpy(steps))


def siblings() -> list[keras.callbacks.Callback]:
    """All callbacks of the fit that is calling a callback right now.

    Keras tells a callback the model and the number of epochs, but not who else is there.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            return list(caller.callbacks)
        frame = frame.f_back
    return []
