"""What each variable learns equals what a plain optimizer of its own would make of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
    ROWS,
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
        branches: Whether a step has branches.
    """

    make: Make
    by_layer: Make | None = None
    callbacks: Callable[[], list[keras.callbacks.Callback]] = list
    compile: dict[str, Any] = field(default_factory=dict)
    clip_all: float | None = None
    branches: bool = False


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
    # The last digits of a gradient near 0, which graph and eager mode sum differently, stay small.
    "accumulation": Case(
        lambda m: adamw(m, gradient_accumulation_steps=2, epsilon=1e-3), branches=True
    ),
    "accumulation_momentum": Case(
        lambda m: momentum(m, gradient_accumulation_steps=3), branches=True
    ),
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
    "no_jit": Case(momentum, compile={"jit_compile": False}),
}
if BACKEND == "torch":
    del WAYS["jit"]  # takes minutes; see below


def train(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights after training with the callback, and by the reference."""
    ours = network()
    ours.compile(case.make(1.0), "mse", **case.compile)
    if isinstance(ours.optimizer, optimizers.ScheduleFreeAdamW):
        ours.optimizer.build(ours.trainable_variables)  # Keras on tensorflow needs it
    fit(ours, LayerwiseLRDecay(DECAY), *case.callbacks())

    reference = network()
    # Tracing takes longer than these few steps; but JAX compiles each branch of each of them.
    eager = {"tensorflow": True, "torch": False, "jax": not case.branches}[BACKEND]
    optimizer = ByLayer(case.by_layer or case.make, LEVELS, case.clip_all)
    reference.compile(optimizer, "mse", **(case.compile or {"run_eagerly": eager}))
    fit(reference)
    return weights(ours), weights(reference)


# Elsewhere than in torch's fused optimizers, all go through the same few lines.
CORE = {"nesterov", "adamw", "rmsprop_centered", "nadam", "muon", "adafactor"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if BACKEND == "torch" or name in CORE else pytest.mark.matrix)
        for name in OPTIMIZERS
    ],
)
def test_every_optimizer(name: str) -> None:
    assert_same(*train(Case(OPTIMIZERS[name])))


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_train(name: str) -> None:
    assert_same(*train(WAYS[name]))


@pytest.mark.skipif(BACKEND != "torch", reason="compiled above")
@pytest.mark.parametrize("name", ["adamw", pytest.param("nadam", marks=pytest.mark.matrix)])
# torch.compile imports modules of torch that use what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_torch_equals_eager_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if not os.environ.get("LKX_MATRIX"):  # trace as always, but do not write and compile C++
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    after = []
    for jit in (True, False):
        model = network()
        model.compile(OPTIMIZERS[name](1.0), "mse", jit_compile=jit)
        fit(model, LayerwiseLRDecay(DECAY), epochs=1)
        after.append(weights(model))
    assert_same(*after)


def gradients() -> dict[str, np.ndarray]:
    """Gradients at the initial weights, from the change that a plain step of SGD makes."""
    model = network()
    before = weights(model)
    model.compile(optimizers.SGD(1.0), "mse", run_eagerly=True)
    fit(model, epochs=1, batch_size=ROWS)
    return {layer_and_name(path): before[path] - after for path, after in weights(model).items()}


def layer_and_name(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def after_one_step(optimizer: keras.Optimizer, callback: LayerwiseLRDecay | None) -> Any:
    """By variable: its initial value, and its value after one step."""
    model = network()
    before = weights(model)
    model.compile(optimizer, "mse", run_eagerly=BACKEND == "tensorflow")
    fit(model, *([callback] if callback else []), epochs=1, batch_size=ROWS)
    return {layer_and_name(p): (before[p], after) for p, after in weights(model).items()}


def test_sgd_moves_each_variable_by_its_rate_times_its_gradient() -> None:
    callback = LayerwiseLRDecay(DECAY)
    moved = after_one_step(optimizers.SGD(0.25), callback)
    for name, gradient in gradients().items():
        before, after = moved[name]
        step = np.float32(0.25 * LEVELS[name[0]]) * gradient
        np.testing.assert_allclose(before - after, step, rtol=1e-5, atol=2e-7)
    assert callback.multipliers_ == {name: LEVELS[name[0]] for name in moved}
    assert callback.levels_ == {0: 0.25, 1: 0.5, 2: 1.0}


def test_weight_decay_is_scaled_with_the_rate() -> None:
    """Without gradients AdamW shrinks each weight by its own rate times the decay."""
    model = network()
    before = weights(model)
    model.compile(optimizers.AdamW(0.1, weight_decay=0.5), loss=lambda y, p: keras.ops.sum(p) * 0)
    fit(model, LayerwiseLRDecay(DECAY), epochs=1, batch_size=ROWS)
    for path, after in weights(model).items():
        factor = LEVELS[layer_and_name(path)[0]]
        np.testing.assert_allclose(after, before[path] * (1 - 0.1 * factor * 0.5), rtol=1e-6)


@pytest.mark.parametrize("own", [False, True], ids=["by_callback", "by_optimizer_too"])
def test_no_weight_decay_on_bias(own: bool) -> None:
    model = network()
    model.get_layer("b").bias.assign(np.ones(5, "float32"))
    before = weights(model)
    optimizer = optimizers.AdamW(0.1, weight_decay=0.5)
    if own:
        optimizer.exclude_from_weight_decay(var_list=[model.get_layer("a").kernel])
    model.compile(optimizer, loss=lambda y, p: keras.ops.sum(p) * 0)
    fit(model, LayerwiseLRDecay(DECAY, no_decay_on_bias_and_norm=True), epochs=1, batch_size=ROWS)
    after = weights(model)
    for path, value in after.items():
        kept = path.endswith("bias") or (own and "/a/" in path)
        assert np.array_equal(value, before[path]) == kept, path


def test_adafactor_is_scaled_after_its_own_cap() -> None:
    make = OPTIMIZERS["adafactor"]
    assert make(1.0).relative_step
    plain = after_one_step(optimizers.Adafactor(7.0), None)  # far above the cap, which is 1
    ours = after_one_step(optimizers.Adafactor(7.0), LayerwiseLRDecay(DECAY))
    for name, (before, after) in ours.items():
        np.testing.assert_allclose(
            after - before, LEVELS[name[0]] * (plain[name][1] - before), rtol=1e-5, atol=1e-6
        )


def test_other_factors_than_powers_of_two() -> None:
    def make(m: float) -> keras.Optimizer:
        return optimizers.AdamW(0.02 * m, weight_decay=0.5)

    ours, reference = network(), network()
    ours.compile(make(1.0), "mse")
    fit(ours, LayerwiseLRDecay(0.7))
    factors = {"a": 0.7**2, "b": 0.7, "c": 1.0}
    reference.compile(ByLayer(make, factors), "mse", run_eagerly=BACKEND == "tensorflow")
    fit(reference)
    assert_same(weights(ours), weights(reference), rtol=2e-6)


def test_decay_of_one_changes_nothing() -> None:
    after = []
    for callbacks in ([LayerwiseLRDecay(1.0)], []):
        model = network()
        model.compile(adamw(1.0), "mse")
        fit(model, *callbacks)
        after.append(weights(model))
    assert_same(*after, rtol=0)


def test_mixed_float16_with_loss_scaling() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    ours, reference = network(), network()
    ours.compile(momentum(1.0), "mse")
    assert isinstance(ours.optimizer, optimizers.LossScaleOptimizer)
    fit(ours, LayerwiseLRDecay(DECAY))
    reference.compile(optimizers.LossScaleOptimizer(ByLayer(momentum, LEVELS)), "mse")
    fit(reference)
    assert_same(weights(ours), weights(reference))


def test_custom_train_step() -> None:
    class Custom(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def call(self, x: Any) -> Any:
            return self.inner(x)

        def train_step(self, *args: Any) -> Any:
            return super().train_step(*args)

    model, plain = Custom(), network()
    model.inner.set_weights(plain.get_weights())
    model.compile(momentum(1.0), "mse")
    fit(model, LayerwiseLRDecay(DECAY))
    plain.compile(momentum(1.0), "mse")
    fit(plain, LayerwiseLRDecay(DECAY))
    assert_same(weights(model), weights(plain))


@pytest.mark.skipif(BACKEND == "torch", reason="Keras on torch allows one step per execution")
def test_steps_per_execution() -> None:
    after = []
    for steps in (1, 2):
        model = network()
        model.compile(momentum(1.0), "mse", steps_per_execution=steps)
        fit(model, LayerwiseLRDecay(DECAY))
        after.append(weights(model))
    assert_same(*after)
