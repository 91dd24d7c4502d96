"""The same class, the same arguments and the same decisions in Lightning and in Keras."""

from __future__ import annotations

import inspect
import os
from typing import Any

# Loaded beside Lightning here; which backend makes no difference to what is decided.
os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import pytest
import torch

import keras_ext.callbacks as in_keras
import lightning_ext.callbacks as in_lightning
from tests.contract import examples
from tests.lightning_ext.helpers import Module, loader, trainer

COMMON = sorted(set(in_keras.__all__) & set(in_lightning.__all__))


def test_both_have_the_same_callbacks() -> None:
    assert COMMON == sorted(in_keras.__all__) == sorted(in_lightning.__all__)


@pytest.mark.parametrize("name", COMMON)
def test_same_arguments_and_defaults(name: str) -> None:
    ours, theirs = (
        {p.name: p.default for p in inspect.signature(getattr(room, name)).parameters.values()}
        for room in (in_lightning, in_keras)
    )
    assert ours == theirs


def keras_net() -> keras.Model:
    """What `tests.lightning_ext.helpers.Net` is, in Keras."""

    class Block(keras.layers.Layer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.norm = keras.layers.LayerNormalization()
            self.up = keras.layers.Dense(16, activation="tanh")
            self.down = keras.layers.Dense(8)

        def call(self, x: Any) -> Any:
            return x + self.down(self.up(self.norm(x)))

    layers = [Block(name="block_0"), Block(name="block_1")]
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, name="embed"),
            *layers,
            keras.layers.LayerNormalization(name="norm"),
            keras.layers.Dense(3, name="head"),
        ]
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"decay": 0.5}, {"groups": lambda name: int("head" in name)}],
    ids=["default", "decay", "groups"],
)
def test_layerwise_decay_decides_alike(options: dict[str, Any]) -> None:
    lightning_callback = in_lightning.LayerwiseLRDecay(**options)
    module = Module(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    trainer(lightning_callback, max_steps=1).fit(module, loader())
    keras_callback = in_keras.LayerwiseLRDecay(**options)
    model = keras_net()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.zeros((8, 6)), np.zeros(8, int)
    model.fit(x, y, callbacks=[keras_callback], verbose=0)
    assert lightning_callback.levels_ == keras_callback.levels_
    assert len(lightning_callback.levels_) == (2 if "groups" in options else 4)
    decided = [
        [(d.step, d.action, dict(d.numbers)) for d in callback.decisions_]
        for callback in (lightning_callback, keras_callback)
    ]
    assert decided[0] == decided[1]


@pytest.mark.parametrize("name", COMMON)
def test_in_the_other_framework_it_says_which_to_take(name: str) -> None:
    ours = getattr(in_lightning, name)(**examples.LIGHTNING.get(name, {}))
    theirs = getattr(in_keras, name)(**examples.KERAS.get(name, {}))
    with pytest.raises(AttributeError, match=f"pass lightning_ext.{name} to a Lightning Trainer"):
        trainer(theirs)
    for ask in (keras.callbacks.CallbackList, lambda callbacks: callbacks[0].set_model(None)):
        with pytest.raises(AttributeError, match=f"pass keras_ext.{name} to model.fit"):
            ask([ours])
