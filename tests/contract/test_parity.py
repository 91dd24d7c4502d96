"""The same class, the same arguments and the same decisions in Lightning and in Keras."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable
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
# Lightning saves the state of callbacks in checkpoints.
KERAS_ALONE = {"PredictiveEarlyStopping": {"state_path"}}


def test_both_have_the_same_callbacks() -> None:
    assert sorted(in_keras.__all__) == sorted(in_lightning.__all__) == COMMON


@pytest.mark.parametrize("name", COMMON)
def test_same_arguments_and_defaults(name: str) -> None:
    ours, theirs = (
        {p.name: p.default for p in inspect.signature(getattr(room, name)).parameters.values()}
        for room in (in_lightning, in_keras)
    )
    assert set(theirs) - set(ours) == KERAS_ALONE.get(name, set())
    assert list(ours.items()) == list(theirs.items())[: len(ours)]


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


EPOCHS = 40
_NOISE = np.random.default_rng(0).normal(0, 0.02, EPOCHS)
CURVES = {
    "falls": [1 / (1 + k) for k in range(EPOCHS)],
    "flat": [1.0, 0.5, 0.3] + [0.25] * (EPOCHS - 3),
    "noisy": [float(0.3 + 0.7 * 0.8**k + _NOISE[k]) for k in range(EPOCHS)],
    "rises": [0.1 + 0.01 * k for k in range(EPOCHS)],
    "lost": [1.0, 0.7, 0.6] + [math.nan] * (EPOCHS - 3),
    "found": [math.inf] * 3 + [1 / (1 + k) for k in range(EPOCHS - 3)],
    "constant": [0.5] * EPOCHS,
}


# Factor on the learning rate, by epoch.
RATES: dict[str, Callable[[int], float]] = {
    "drop": lambda epoch: 1.0 if epoch < 15 else 0.1,
    "two drops": lambda epoch: 0.1 ** (epoch // 9),
    "warm-up": lambda epoch: min(1.0, (1 + epoch) / 12),
    "cosine": lambda epoch: (1 + math.cos(math.pi * epoch / EPOCHS)) / 2,
}
TRAIN = [0.9**k for k in range(EPOCHS)]


class Told(Module):
    """Has the given values as its metric, one for each epoch."""

    def __init__(self, values: list[float], rate: Callable[[int], float]) -> None:
        super().__init__(self.schedule)
        self.values, self.rate = values, rate

    def schedule(self, module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for name, values in (("val_loss", self.values), ("other_loss", TRAIN)):
            self.log(name, torch.tensor(values[self.current_epoch], dtype=torch.float64))


class Tells(keras.callbacks.Callback):
    """The same in Keras."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs.update(val_loss=self.values[epoch], other_loss=TRAIN[epoch])


def stopped_in_both(
    values: list[float], rate: Callable[[int], float] = lambda epoch: 1.0, **options: Any
) -> tuple[Any, Any]:
    """The callbacks of Lightning and of Keras, after fits with the same curve and rates."""
    arguments = {"monitor": "val_loss", "train_monitor": "other_loss", **options}
    ours, theirs = (room.PredictiveEarlyStopping(**arguments) for room in (in_lightning, in_keras))
    one_batch = loader(size=8)
    trainer(ours, max_epochs=EPOCHS).fit(Told(values, rate), one_batch, one_batch)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 * rate(epoch))
    callbacks = [Tells(values), scheduler, theirs]
    model.fit(np.zeros((1, 1)), np.zeros(1), epochs=EPOCHS, callbacks=callbacks, verbose=0)
    return ours, theirs


def said(callback: Any) -> dict[str, Any]:
    return {
        "stopped": (callback.stopped_epoch_, callback.reason_),
        "best": (callback.best_, callback.best_epoch_),
        "decided": [(d.step, d.action, d.reason, dict(d.numbers)) for d in callback.decisions_],
    }


@pytest.mark.filterwarnings("ignore:PredictiveEarlyStopping.*patience:UserWarning")
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(
    "options",
    [
        {"preset": "safe"},
        {"preset": "fast", "restore_best": True},
        {"min_improvement": 0.2, "start_from_epoch": 10},
        {"target": 0.01, "p_target": 0.2},
        {"horizon": 3, "patience": 5, "mode": "max"},
    ],
    ids=str,
)
def test_early_stopping_decides_alike(options: dict[str, Any], curve: str) -> None:
    ours, theirs = stopped_in_both(CURVES[curve], **options)
    assert said(ours) == said(theirs)
    if curve == "lost" and "start_from_epoch" not in options:
        assert ours.stopped_epoch_ in range(2, 6)
    if curve == "found":
        assert (ours.stopped_epoch_ == 2) == ("start_from_epoch" not in options)


def test_early_stopping_holds_a_lost_run_only_at_the_start() -> None:
    for options, at in (({}, 2), ({"start_from_epoch": 5}, 5)):
        ours, theirs = stopped_in_both([math.nan] * EPOCHS, RATES["drop"], **options)
        assert said(ours) == said(theirs)
        assert ours.stopped_epoch_ == at


@pytest.mark.filterwarnings("ignore:PredictiveEarlyStopping.*patience:UserWarning")
@pytest.mark.parametrize("shape", RATES)
def test_early_stopping_waits_alike_for_the_learning_rate(shape: str) -> None:
    ours, theirs = stopped_in_both(
        CURVES["flat"], RATES[shape], min_improvement=1.0, patience=1, wait_for_schedule=True
    )
    assert said(ours) == said(theirs)
    assert (ours.stopped_epoch_ > 8) == (shape != "cosine")


@pytest.mark.parametrize("name", COMMON)
def test_in_the_other_framework_it_says_which_to_take(name: str) -> None:
    ours = getattr(in_lightning, name)(**examples.LIGHTNING.get(name, {}))
    theirs = getattr(in_keras, name)(**examples.KERAS.get(name, {}))
    with pytest.raises(AttributeError, match=f"pass lightning_ext.{name} to a Lightning Trainer"):
        trainer(theirs)
    for ask in (keras.callbacks.CallbackList, lambda callbacks: callbacks[0].set_model(None)):
        with pytest.raises(AttributeError, match=f"pass keras_ext.{name} to model.fit"):
            ask([ours])
