"""Fits in which a metric takes given values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.optimizers import schedules

from keras_ext import PredictiveEarlyStopping
from strategies.decisions import Decision
from tests.keras_ext.helpers import STEPS, fit, network

FALLING = [1 / (1 + k) for k in range(30)]
FLAT = [1.0, 0.5, 0.3] + [0.25] * 27
NEVER: dict[str, Any] = {"min_improvement": 0.0, "patience": 1000}


class Shows(keras.callbacks.Callback):
    """Puts values of its own into the logs, one for each epoch; None leaves it out."""

    def __init__(self, values: Sequence[Any], name: str = "val_loss") -> None:
        super().__init__()
        self.values, self.name = values, name

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.values[epoch] is not None:
            logs[self.name] = self.values[epoch]


def compiled(optimizer: Any = "sgd", **options: Any) -> keras.Model:
    model = network()
    model.compile(optimizer, "mse", **options)
    return model


def shown(
    values: Sequence[Any],
    stopping: PredictiveEarlyStopping,
    *others: keras.callbacks.Callback,
    model: keras.Model | None = None,
    **options: Any,
) -> keras.callbacks.History:
    """Fit while the monitored metric takes the given values, other callbacks coming first."""
    options = {"epochs": len(values), **options}
    return fit(model or compiled(), *others, Shows(values, stopping.monitor), stopping, **options)


def without_falls(stopping: PredictiveEarlyStopping) -> list[Decision]:
    """Its decisions, whatever the shipped network makes of the curve."""
    return [d for d in stopping.decisions_ if d.action != "fall back"]


def drops_at(epoch: int) -> Callable[[int, float], float]:
    return lambda e, rate: 0.01 if e >= epoch else 0.1


def piecewise(*epochs: int) -> Any:
    """Drops by ten as these epochs begin; Keras counts a boundary to the rate before it."""
    steps = [STEPS * epoch - 1 for epoch in epochs]
    return schedules.PiecewiseConstantDecay(steps, [0.1 / 10**i for i in range(len(steps) + 1)])
