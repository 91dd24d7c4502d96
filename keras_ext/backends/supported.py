"""Which optimizers can have a learning rate for each variable."""

from __future__ import annotations

from typing import Any

import keras

_INSTEAD = {
    "Ftrl": (
        "draws every weight towards zero whatever the learning rate, so a smaller rate is no "
        "smaller update; use SGD, Adagrad or AdamW"
    ),
    "MultiOptimizer": "holds several optimizers with rates of their own; compile with one of them",
}


def innermost(optimizer: Any) -> keras.Optimizer:
    """The optimizer that makes the updates, within any `LossScaleOptimizer`.

    Raises:
        TypeError: It cannot have a rate for each variable.
        ValueError: There is no optimizer.
    """
    if optimizer is None:
        raise ValueError("the model has no optimizer; pass one to model.compile(optimizer=...)")
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is no Keras 3 optimizer; pass one from keras.optimizers "
            "to model.compile(optimizer=...)"
        )
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("keras.") and kind.__name__ in _INSTEAD:
            raise TypeError(f"{kind.__name__} {_INSTEAD[kind.__name__]}")
    return optimizer
