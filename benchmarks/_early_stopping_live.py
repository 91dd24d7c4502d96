"""Real training, stopped while it runs: three small tasks in both frameworks."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

FRAMEWORKS = ("Lightning", "Keras")
RULES = ("full budget", "patience 10", "balanced")
BATCH = 64


@dataclass(frozen=True)
class Task:
    """One task.

    Args:
        name: For the table.
        epochs: Budget.
        data: Makes training and validation arrays from a seed.
        kind: Of network: `"mlp"`, `"cnn"` or `"text"`.
    """

    name: str
    epochs: int
    data: Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]
    kind: str


@dataclass(frozen=True)
class Ran:
    """Validation loss after each epoch that was run, and how long it took."""

    losses: list[float]
    seconds: float


def digits(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Half of scikit-learn's digits to train on, half to validate on."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, 8, 8)
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = order[:900], order[900:]
    return x[train], y[train].astype(np.int64), x[test], y[test].astype(np.int64)


CONTEXT = 12  # characters


def text(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Next characters in the descriptions of scikit-learn's data sets; the last part validates."""
    from sklearn import datasets

    loaders = ("load_breast_cancer", "load_diabetes", "load_digits", "load_iris", "load_wine")
    letters = " ".join(getattr(datasets, name)().DESCR for name in loaders).lower()
    known = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz .,:-0123456789\n")}
    codes = np.array([known.get(c, 0) for c in letters])
    x = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT)[:-1].astype(np.int64)
    y = codes[CONTEXT:].astype(np.int64)
    cut = int(0.8 * len(x))
    random = np.random.default_rng(seed)
    train = random.choice(cut - CONTEXT, 3000, replace=False)
    test = random.choice(np.arange(cut, len(x)), 1000, replace=False)
    return x[train], y[train], x[test], y[test]


TASKS = (
    Task("digits, MLP", 100, digits, "mlp"),
    Task("digits, CNN", 60, digits, "cnn"),
    Task("next character, MLP", 60, text, "text"),
)


def measure(seeds: int = 5, epochs: int | None = None) -> dict[str, Any]:
    """Run every task in both frameworks with every rule.

    Args:
        seeds: How many seeds.
        epochs: Budget of all tasks. Default: None, that of each.
    """
    os.environ.setdefault("KERAS_BACKEND", "torch")
    cases = []
    for framework in FRAMEWORKS:
        run = _in_lightning if framework == "Lightning" else _in_keras
        for task in TASKS:
            budget = epochs or task.epochs
            runs: dict[str, list[Ran]] = {rule: [] for rule in RULES}
            for seed in range(seeds):
                for rule in RULES:
                    start = time.perf_counter()
                    losses = run(task, seed, budget, rule)
                    runs[rule].append(Ran(losses, time.perf_counter() - start))
            cases += list(_summaries(framework, task.name, budget, runs))
    return {"seeds": seeds, "cases": cases}


def _summaries(
    framework: str, task: str, budget: int, runs: dict[str, list[Ran]]
) -> Iterator[dict[str, Any]]:
    full = runs["full budget"]
    for rule, ran in runs.items():
        lost = [
            (min(r.losses) - min(f.losses)) / (max(f.losses) - min(f.losses))
            for r, f in zip(ran, full, strict=True)
        ]
        yield {
            "framework": framework,
            "task": task,
            "epochs": budget,
            "rule": rule,
            "saved": float(np.median([1 - len(r.losses) / budget for r in ran])),
            "lost": float(np.median(lost)),
            "most lost": float(max(lost)),
            "metric": float(np.median([min(r.losses) for r in ran])),
            "seconds": float(np.median([r.seconds for r in ran])),
            # A callback that only watches leaves the losses as they are.
            "same losses": all(
                np.allclose(r.losses, f.losses[: len(r.losses)], rtol=1e-4)
                for r, f in zip(ran, full, strict=True)
            ),
        }


def _in_lightning(task: Task, seed: int, epochs: int, rule: str) -> list[float]:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_ext import PredictiveEarlyStopping

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = _torch_network(task.kind), list[float]()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, on_epoch=True, on_step=False)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

        def on_validation_epoch_end(self) -> None:
            self.losses.append(float(self.trainer.callback_metrics["val_loss"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-3)

    torch.manual_seed(seed)
    arrays = [torch.from_numpy(a) for a in task.data(seed)]
    generator = torch.Generator().manual_seed(seed)
    train = DataLoader(TensorDataset(*arrays[:2]), BATCH, shuffle=True, generator=generator)
    test = DataLoader(TensorDataset(*arrays[2:]), 1000)
    callbacks: list[Any] = []
    if rule == "patience 10":
        callbacks = [EarlyStopping("val_loss", patience=10)]
    elif rule != "full budget":
        callbacks = [PredictiveEarlyStopping("val_loss", preset=rule, verbose=False)]
    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_epochs=epochs, callbacks=callbacks, logger=False, accelerator="cpu",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(module, train, test)
    return module.losses


def _torch_network(kind: str) -> Any:
    from torch import nn

    if kind == "text":
        return nn.Sequential(
            nn.Embedding(42, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 96), nn.ReLU(),
            nn.Linear(96, 42),
        )  # fmt: skip
    if kind == "mlp":
        layers = [nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)]
        return nn.Sequential(*layers)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def _in_keras(task: Task, seed: int, epochs: int, rule: str) -> list[float]:
    import keras

    from keras_ext import PredictiveEarlyStopping

    keras.utils.set_random_seed(seed)
    keras.config.disable_interactive_logging()
    x, y, x_test, y_test = task.data(seed)
    model = keras.Sequential(_keras_layers(task.kind))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks: list[Any] = []
    if rule == "patience 10":
        callbacks = [keras.callbacks.EarlyStopping("val_loss", patience=10)]
    elif rule != "full budget":
        callbacks = [PredictiveEarlyStopping("val_loss", preset=rule, verbose=False)]
    history = model.fit(
        x, y, batch_size=BATCH, epochs=epochs, validation_data=(x_test, y_test),
        validation_batch_size=1000, callbacks=callbacks, verbose=0,
    )  # fmt: skip
    return [float(loss) for loss in history.history["val_loss"]]


def _keras_layers(kind: str) -> list[Any]:
    from keras import layers

    if kind == "text":
        return [
            layers.Embedding(42, 16), layers.Flatten(), layers.Dense(96, "relu"), layers.Dense(42),
        ]  # fmt: skip
    if kind == "mlp":
        return [
            layers.Flatten(), layers.Dense(64, "relu"), layers.Dropout(0.2), layers.Dense(10),
        ]  # fmt: skip
    return [
        layers.Reshape((8, 8, 1)), layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2), layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Flatten(), layers.Dense(10),
    ]  # fmt: skip
