"""A model with batch norm inside and outside of what is cut, and the same by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ext import ThreeDParallelStrategy
from tests.lightning_ext.parallel.models import Recorded

COPIES, MICROBATCHES, ITEMS, BATCH, EPOCHS = 2, 2, 32, 16, 2
LAYOUT = {"pipeline": 2, "microbatches": MICROBATCHES}


class Normalized(Recorded):
    """Normalizes its inputs and outputs outside of the model, too."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(ITEMS, BATCH)
        torch.manual_seed(0)
        self.before, self.after = nn.BatchNorm1d(4), nn.BatchNorm1d(3)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(),
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3),
        )  # fmt: skip

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.items, 4, generator=generator, dtype=torch.float64) * 3 + 1
        return TensorDataset(inputs, inputs[:, :3].square())

    def step(self, batch: list[Tensor]) -> Tensor:
        return (self.after(self.model(self.before(batch[0]))) - batch[1]).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


def on_ranks() -> dict[str, Any]:
    """The state after a fit on ranks, and the last validation loss."""
    strategy, module = ThreeDParallelStrategy(**LAYOUT), Normalized()
    trainer = pl.Trainer(
        devices=4, accelerator="cpu", max_epochs=EPOCHS, logger=False, precision="64-true",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, strategy=strategy,
    )  # fmt: skip
    trainer.fit(module)
    return {
        "state": strategy.lightning_module_state_dict(),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }


def parts(module: Normalized) -> Iterator[tuple[int, list[list[Tensor]]]]:
    """The microbatches of each copy in each step."""
    tensors = module.data().tensors
    for start in range(0, ITEMS, BATCH):
        for copy in range(COPIES):
            own = [x[start + copy : start + BATCH : COPIES].chunk(MICROBATCHES) for x in tensors]
            yield copy, [list(pair) for pair in zip(*own, strict=True)]


def in_a_loop() -> dict[str, Any]:
    """The same by hand: the running statistics of the first copy alone."""
    module = Normalized().double()
    optimizer = module.configure_optimizers()
    for _ in range(EPOCHS):
        for copy, batches in parts(module):
            kept = [b.clone() for b in module.buffers()]
            for batch in batches:
                (module.step(batch) / (COPIES * MICROBATCHES)).backward()
            if copy:
                for buffer, value in zip(module.buffers(), kept, strict=True):
                    buffer.copy_(value)
            if copy == COPIES - 1:
                optimizer.step()
                optimizer.zero_grad()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.eval()
    with torch.no_grad():
        loss = module.step(list(module.data().tensors))
    return {"state": state, "val_loss": float(loss)}
