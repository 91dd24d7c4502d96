"""Blocks on torch that leave something behind beside Keras variables."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from keras_ext import DynamicGradientCheckpointing
from tests.keras_ext.helpers import BACKEND, warned
from tests.keras_ext.recompute_models import LENGTH, WIDTH, Block, built, data
from tests.keras_ext.test_gradient_checkpointing import assert_equal, everything, saver
from tests.keras_ext.test_recompute_oddities import stack

if BACKEND != "torch":
    pytest.skip("torch alone", allow_module_level=True)

import torch


class Buffer(Block):
    def build(self, shape: Any) -> None:
        super().build(shape)
        self.register_buffer("seen", torch.zeros(()))

    def call(self, x: Any, training: bool | None = None) -> Any:
        self.seen += 1
        return super().call(x * self.seen, training)


class UncountedWrite(Buffer):
    def call(self, x: Any, training: bool | None = None) -> Any:
        self.seen.data.add_(1)
        return Block.call(self, x, training) * self.seen


class Counter(Block):
    calls = 0

    def call(self, x: Any, training: bool | None = None) -> Any:
        self.calls += 1
        return super().call(x, training) * (1.0 + self.calls % 2)


class Counts(Block):
    """Counts in a dict and a deque of an object."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.own = type("Own", (), {})()
        self.own.counts, self.own.last = {"calls": 0}, deque([0], maxlen=1)

    def call(self, x: Any, training: bool | None = None) -> Any:
        self.own.counts["calls"] += 1
        self.own.last.append(self.own.last[-1] + 1)
        factor = self.own.counts["calls"] + self.own.last[-1]
        return super().call(x, training) * factor


class Array(Block):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.own = type("Own", (), {})()
        self.own.counts = np.zeros(2)

    def call(self, x: Any, training: bool | None = None) -> Any:
        self.own.counts += 1
        return super().call(x, training) * float(self.own.counts[0])


class HiddenSeed(Block):
    """Holds a generator of Keras where Keras does not look."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.own = type("Own", (), {})()
        self.own.seed = keras.random.SeedGenerator(0)

    def call(self, x: Any, training: bool | None = None) -> Any:
        return keras.random.dropout(super().call(x, training), 0.5, seed=self.own.seed)


class OfNumpy(Block):
    def call(self, x: Any, training: bool | None = None) -> Any:
        return super().call(x, training) * float(np.random.normal())


class OfPython(Block):
    def call(self, x: Any, training: bool | None = None) -> Any:
        return super().call(x, training) * random.random()


class OwnGenerator(Block):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.own = np.random.default_rng(0), random.Random(0), torch.Generator()

    def call(self, x: Any, training: bool | None = None) -> Any:
        draw = torch.rand((), generator=self.own[2]) + self.own[0].random() + self.own[1].random()
        return super().call(x, training) * draw


class Assigns(Block):
    def call(self, x: Any, training: bool | None = None) -> Any:
        self.scale.assign(self.scale * 0.9)
        return super().call(x, training)


class InPlace(Block):
    def call(self, x: Any, training: bool | None = None) -> Any:
        return super().call(x.mul_(0.5) if training else x * 0.5, training)


class Iterates(Block):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.own = itertools.cycle((0.5, 1.5))

    def call(self, x: Any, training: bool | None = None) -> Any:
        return super().call(x, training) * next(self.own)


class Transforms(Block):
    def call(self, x: Any, training: bool | None = None) -> Any:
        slope = torch.func.vmap(torch.func.grad(lambda v: torch.sin(v).sum()))
        return super().call(x, training) + slope(x.reshape(-1, WIDTH)).reshape(x.shape)


class OfTorch(Block):
    """Running statistics of a module of torch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = layers.TorchModuleWrapper(
            torch.nn.BatchNorm1d(LENGTH), output_shape=(None, LENGTH, WIDTH)
        )

    def call(self, x: Any, training: bool | None = None) -> Any:
        return super().call(self.inner(x), training)


def left_behind(model: keras.Model) -> list[Any]:
    """What blocks have left behind that is no Keras variable."""
    own = [getattr(layer, "own", None) for layer in model.layers]
    held = [vars(o) for o in own if hasattr(o, "counts")]
    seeds = [o.seed.state.numpy() for o in own if hasattr(o, "seed")]
    numbers = [getattr(layer, "calls", 0) for layer in model.layers]
    buffers = [b.numpy() for part in model.layers for b in part.buffers()]
    return [*map(str, held), str(seeds), str(numbers), str(buffers)]


ODD = {
    Buffer: "it writes to block_1.seen",
    UncountedWrite: "it writes to block_1.seen",
    Counter: "it changes block_1.calls",
    Counts: "it changes block_1.own.counts.calls",
    Array: "it writes to block_1.own.counts",
    HiddenSeed: "called twice, it does not give the same",
    OfNumpy: "it draws from NumPy's random numbers",
    OfPython: "it draws from Python's random numbers",
    OwnGenerator: "it draws from block_1.own.",
    Assigns: "it assigns to .*scale, which is trained",
    InPlace: "it assigns to what it takes",
    Iterates: "it draws from block_1.own",
    Transforms: "it calls transforms of torch.func",
    OfTorch: "it writes to BatchNorm1d.running_mean",
}


def trained(
    kind: type[Block], *callbacks: keras.callbacks.Callback
) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Everything that training leaves, with one block in three of a kind."""
    model = stack(lambda i: (kind if i == 1 else Block)(name=f"block_{i}"))
    keras.utils.set_random_seed(1)
    x, y = data()
    model.fit(x, y, 4, 2, shuffle=False, verbose=0, callbacks=[*callbacks])
    draws = [random.random(), np.random.random(), float(torch.rand(()))]
    return everything(model), [*left_behind(model), draws]


@pytest.mark.parametrize("kind", ODD, ids=lambda kind: kind.__name__)
def test_what_a_call_leaves_behind_counts_once(kind: type[Block]) -> None:
    variables, rest = trained(kind)
    ours = DynamicGradientCheckpointing(0.7)
    with warned(rf"'block_1' cannot be run again \({ODD[kind]}.*exclude=\['block_1'\]"):
        found = trained(kind, ours)
    assert_equal(found[0], variables)
    assert found[1] == rest
    assert {block.name for block in ours.report_.blocks} == {"block_0", "block_2", "other code"}
    assert ours.plan_.spans


class Hands(Block):
    """Keeps what others may look at: a shape, a tensor with its graph."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        self.shape = tuple(x.shape)
        self.aux = super().call(x, training)
        return self.aux


def test_what_a_call_keeps_for_others_is_no_obstacle() -> None:
    variables, _ = trained(Hands)
    ours = saver(2, exclude=["block_0", "block_2"])
    with warned("can be brought to"):
        assert_equal(trained(Hands, ours)[0], variables)
    assert ours.plan_.spans


class TwoPasses(keras.Model):
    """Gradients of two losses, one backward pass for each."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        self.zero_grad()
        output = self(x, training=True)
        self.compute_loss(y=y, y_pred=output).backward(retain_graph=True)
        output.square().mean().backward()
        trained = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in trained], trained)
        return {}


@pytest.mark.parametrize("kind", ["transformer", "convolutional"])
def test_two_backward_passes_of_one_step(kind: str) -> None:
    def run(*callbacks: Any) -> dict[str, np.ndarray]:
        inner = built(kind)
        model = TwoPasses(inner.inputs, inner.outputs)
        model.compile("sgd", "mse")
        keras.utils.set_random_seed(1)
        model.fit(*data(), 4, 2, shuffle=False, verbose=0, callbacks=[*callbacks])
        return everything(model)

    ours = saver(0.7)
    assert_equal(run(ours), run())
    assert ours.plan_.spans


def test_the_error_of_a_block_that_differs_later_names_it() -> None:
    switch = [1]

    class Switched(Block):
        def call(self, x: Any, training: bool | None = None) -> Any:
            return super().call(x, training) if switch[0] % 7 else x

    class Turns(keras.losses.Loss):
        def call(self, y: Any, output: Any) -> Any:
            switch[0] += 1
            return (output - y) ** 2

    model = stack(lambda i: Switched(name=f"block_{i}"))
    model.compile("sgd", Turns())
    with pytest.raises(torch.utils.checkpoint.CheckpointError) as caught:
        model.fit(*data(), 1, 2, verbose=0, callbacks=[saver(0.6)])
    assert "exclude=['block_" in " ".join(caught.value.__notes__)
