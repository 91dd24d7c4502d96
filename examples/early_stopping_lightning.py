"""Train a small network on digits with Lightning, to the end and with `PredictiveEarlyStopping`.

Run it with `python -m examples.early_stopping_lightning`.
"""

from __future__ import annotations

import logging

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_ext import PredictiveEarlyStopping

EPOCHS = 100


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
        self.network = nn.Sequential(*layers)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        return nn.functional.cross_entropy(self.network(images), digits)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, digits = batch
        self.log("val_loss", nn.functional.cross_entropy(self.network(images), digits))

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(callbacks: list) -> Classifier:
    seed_everything(0, verbose=False)
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(images / 16).float(), torch.from_numpy(digits))
    known, held_out = random_split(data, [0.6, 0.4])
    module = Classifier()
    trainer = Trainer(
        max_epochs=EPOCHS,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, DataLoader(known, 32, shuffle=True), DataLoader(held_out, 1000))
    return module


def run() -> tuple[dict[str, Classifier], PredictiveEarlyStopping]:
    """The same run twice: to its end, and stopped where the rest is not worth it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # threads cost more than they give at this size
    stopping = PredictiveEarlyStopping("val_loss", preset="safe", restore_best=True)
    fits = {"to the end": fit([]), "PredictiveEarlyStopping": fit([stopping])}
    return fits, stopping


def main() -> None:
    fits, stopping = run()
    for decision in stopping.decisions_:
        print(f"{decision.action}: {decision.reason}")
    for label, module in fits.items():
        count, best = len(module.losses), min(module.losses)
        print(f"{label}: best loss {best:.4f} in {count} of {EPOCHS} epochs")


if __name__ == "__main__":
    main()
