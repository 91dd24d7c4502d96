"""Train a small transformer on digits over two stages, with an unchanged LightningModule.

Run it with `python -m examples.three_d_parallel`; Lightning starts the second process by itself.
"""

from __future__ import annotations

import logging
import subprocess
import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_ext import ThreeDParallelStrategy


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = (Block(32) for _ in range(4))  # rows of pixels are the tokens
        self.network = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Flatten(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        return nn.functional.cross_entropy(self.network(images), digits)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, digits = batch
        self.log("accuracy", (self.network(images).argmax(1) == digits).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Fit on two processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    images, digits = load_digits(return_X_y=True)
    rows = torch.from_numpy(images / 16).float().view(-1, 8, 8)
    data = TensorDataset(rows, torch.from_numpy(digits))
    known, held_out = random_split(data, [0.6, 0.4])
    strategy = ThreeDParallelStrategy(pipeline=2, microbatches=4)
    trainer = Trainer(
        max_epochs=4,
        devices=2,
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Classifier()
    trainer.fit(module, DataLoader(known, 64, shuffle=True), DataLoader(held_out, 1000))
    if trainer.is_global_zero:
        held = sum(p.numel() for p in module.parameters() if not p.is_meta)
        everything = sum(p.numel() for p in module.parameters())
        print("Two stages in Lightning:", strategy)
        print(f"The first process holds {held:,} of {everything:,} parameters;", end=" ")
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f} on held-out digits.")


def run() -> None:
    """What `main` does, in processes of its own: Lightning starts the running script again."""
    command = [sys.executable, "-W", "ignore", "-m", "examples.three_d_parallel"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    print(done.stdout if done.returncode == 0 else done.stderr)
    done.check_returncode()


if __name__ == "__main__":
    main()
