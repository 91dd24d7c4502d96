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
        ValueError: There is no optimizer, or Keras would wipe the weights with it.
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
    kinds = {c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith("keras.")}
    for kind in kinds & set(_INSTEAD):
        raise TypeError(f"{kind} {_INSTEAD[kind]}")
    if (
        "ScheduleFreeAdamW" in kinds
        and keras.backend.backend() == "tensorflow"
        and not optimizer.built
    ):
        raise ValueError(
            "on tensorflow, Keras' ScheduleFreeAdamW sets all weights to zero in its first step "
            "unless it is built before; call model.optimizer.build(model.trainable_variables)"
        )
    return optimizer
