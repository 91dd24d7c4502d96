"""Train a vision transformer on digits with half of its activations, in Lightning.

Run it with `python -m examples.gradient_checkpointing_lightning`.
"""

from __future__ import annotations

import logging

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.digits import load
from examples.layerwise_lr_decay_lightning import VisionTransformer
from lightning_ext import DynamicGradientCheckpointing


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = VisionTransformer(width=64, depth=8)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        return nn.functional.cross_entropy(self.network(images), digits)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(callbacks: list) -> Classifier:
    seed_everything(0, verbose=False)
    known, _, _ = load()
    data = TensorDataset(torch.from_numpy(known.x), torch.from_numpy(known.y))
    trainer = Trainer(
        max_epochs=1,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(module, DataLoader(data, 64, shuffle=True, drop_last=True))
    return module


def run() -> tuple[bool, DynamicGradientCheckpointing]:
    """Train with and without; whether the weights are the same, and the callback."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # threads cost more than they give at this size
    half = DynamicGradientCheckpointing(memory_budget=0.5)
    weights = [fit(callbacks).state_dict().values() for callbacks in ([], [half])]
    return all(map(torch.equal, *weights)), half


def main() -> None:
    same, half = run()
    print(half.report_.explain(5))
    print(f"the weights are those of the plain run: {same}")


if __name__ == "__main__":
    main()
