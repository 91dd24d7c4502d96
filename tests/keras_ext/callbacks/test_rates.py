"""What each variable learns equals what a plain optimizer of its own would make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
from keras import optimizers

from keras_ext import LayerwiseLRDecay
from tests.keras_ext.helpers import (
    BACKEND,
    DECAY,
    LEVELS,
    STEPS,
    ByLayer,
    assert_same,
    fit,
    network,
    weights,
)

Make = Callable[[float], keras.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: optimizers.SGD(0.1 * m),
    "momentum": lambda m: optimizers.SGD(0.1 * m, momentum=0.9),
    "nesterov": lambda m: optimizers.SGD(0.1 * m, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda m: optimizers.Adam(0.02 * m),
    "amsgrad": lambda m: optimizers.Adam(0.02 * m, amsgrad=True),
    "adamw": lambda m: optimizers.AdamW(0.02 * m, weight_decay=0.5),
    "rmsprop": lambda m: optimizers.RMSprop(0.02 * m),
    "rmsprop_centered": lambda m: optimizers.RMSprop(0.02 * m, momentum=0.9, centered=True),
    "adagrad": lambda m: optimizers.Adagrad(0.05 * m),
    "adadelta": lambda m: optimizers.Adadelta(1.0 * m),
    "adamax": lambda m: optimizers.Adamax(0.02 * m),
    "nadam": lambda m: optimizers.Nadam(0.02 * m),
    "lion": lambda m: optimizers.Lion(0.01 * m),
    "lamb": lambda m: optimizers.Lamb(0.02 * m),
    "muon": lambda m: optimizers.Muon(0.02 * m, weight_decay=0.1, adam_weight_decay=0.2),
    "adafactor": lambda m: optimizers.Adafactor(0.02 * m),  # below its own cap
    "schedule_free": lambda m: optimizers.ScheduleFreeAdamW(0.02 * m),
}


class Halved(optimizers.schedules.LearningRateSchedule):
    """`rate * m`, halved every `every` steps."""

    def __init__(self, rate: float, m: float, every: int = STEPS) -> None:
        self.rate, self.m, self.every = rate, m, every

    def __call__(self, step: Any) -> Any:
        epoch = keras.ops.floor_divide(keras.ops.cast(step, "int32"), self.every)
        return self.rate * self.m * keras.ops.power(0.5, keras.ops.cast(epoch, "float32"))

    def get_config(self) -> dict[str, Any]:
        return {"rate": self.rate, "m": self.m, "every": self.every}


def halved_by_scheduler() -> keras.callbacks.Callback:
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.02 * 0.5**epoch)


def halved_by_plateau() -> keras.callbacks.Callback:
    # No epoch is ever better by so much, so each but the first halves the rate for the next.
    return keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e6)


@dataclass
class Case:
    """A way to train, and how the reference says the same.

    Args:
        make: Builds the optimizer that is scaled; called with 1.
        by_layer: Builds the optimizer of a layer. Default: `make`.
        callbacks: Callbacks beside ours.
        compile: Arguments for `compile`, of both.
        clip_all: What the reference clips the gradients of all layers together to.
    """

    make: Make
    by_layer: Make | None = None
    callbacks: Callable[[], list[keras.callbacks.Callback]] = list
    compile: dict[str, Any] = field(default_factory=dict)
    clip_all: float | None = None


def adamw(m: float, rate: Any = None, **options: Any) -> keras.Optimizer:
    return optimizers.AdamW(0.02 * m if rate is None else rate, weight_decay=0.5, **options)


def momentum(m: float, **options: Any) -> keras.Optimizer:
    return optimizers.SGD(0.1 * m, momentum=0.9, **options)


def constant(m: float) -> Callable[[], float]:
    return lambda: 0.02 * m


def plateau_schedule(m: float) -> Halved:
    class Later(Halved):
        def __call__(self, step: Any) -> Any:
            return super().__call__(keras.ops.maximum(step - STEPS, 0))

    return Later(0.02, m)


WAYS: dict[str, Case] = {
    "schedule": Case(lambda m: adamw(m, Halved(0.02, 1)), lambda m: adamw(m, Halved(0.02, m))),
    "callable": Case(lambda m: adamw(m, constant(1)), lambda m: adamw(m, constant(m))),
    "scheduler": Case(adamw, lambda m: adamw(m, Halved(0.02, m)), lambda: [halved_by_scheduler()]),
    "plateau": Case(adamw, lambda m: adamw(m, plateau_schedule(m)), lambda: [halved_by_plateau()]),
    "accumulation": Case(lambda m: adamw(m, gradient_accumulation_steps=2)),
    "accumulation_momentum": Case(lambda m: momentum(m, gradient_accumulation_steps=3)),
    "ema": Case(lambda m: adamw(m, use_ema=True, ema_momentum=0.5)),
    "ema_overwrite": Case(
        lambda m: momentum(m, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    ),
    "clipnorm": Case(lambda m: momentum(m, clipnorm=0.1)),
    "clipvalue": Case(lambda m: momentum(m, clipvalue=0.05)),
    "global_clipnorm": Case(lambda m: momentum(m, global_clipnorm=0.3), momentum, clip_all=0.3),
    "loss_scale_factor": Case(lambda m: momentum(m, loss_scale_factor=64.0)),
    "eagerly": Case(adamw, compile={"run_eagerly": True}),
    "jit": Case(adamw, compile={"jit_compile": True}),
    "jit_nadam": Case(OPTIMIZERS["nadam"], compile={"jit_compile": True}),
    "no_jit": Case(momentum, compile={"jit_compile": False}),
}


def train(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights after training with the callback, and by the reference."""
    ours = network()
    ours.compile(case.make(1.0), "mse", **case.compile)
    if isinstance(ours.optimizer, optimizers.ScheduleFreeAdamW):
        ours.optimizer.build(ours.trainable_variables)  # Keras on tensorflow needs it
    fit(ours, LayerwiseLRDecay(DECAY), *case.callbacks())

    reference = network()
    options = case.compile or {"run_eagerly": BACKEND != "torch"}  # tracing takes longer
    optimizer = ByLayer(case.by_layer or case.make, LEVELS, case.clip_all)
    reference.compile(optimizer, "mse", **options)
    fit(reference)
    return weights(ours), weights(reference)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    assert_same(*train(Case(OPTIMIZERS[name])))


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_train(name: str, fast_jit: None) -> None:
    assert_same(*train(WAYS[name]))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["jit", "jit_nadam"])
# torch.compile imports modules of torch that use what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.skipif(BACKEND != "torch", reason="compiled to the end above")
def test_torch_compiled_to_the_end(name: str) -> None:
    assert_same(*train(WAYS[name]))
