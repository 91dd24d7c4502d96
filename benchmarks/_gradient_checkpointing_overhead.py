"""Steps of `Trainer.fit` with `DynamicGradientCheckpointing` where nothing is run again."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from benchmarks._baton import Pause, alternate
from benchmarks._gradient_checkpointing_torch import VOCABULARY, Transformer
from benchmarks._layerwise_steps_lightning import Repeat, StepBegins
from lightning_ext import DynamicGradientCheckpointing


class Module(LightningModule):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.network = Transformer(blocks, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.network(batch)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def overhead(blocks: int, width: int, steps: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of each step, bare and with the callback, in turns."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    tokens = torch.randint(VOCABULARY, (4, 64))

    def fit(*callbacks: Any) -> Any:
        def run(pause: Pause) -> None:
            trainer = Trainer(
                max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False,
                callbacks=[StepBegins(pause), *callbacks],
            )  # fmt: skip
            trainer.fit(Module(blocks, width), Repeat(tokens, warmup + steps + 1))

        return run

    fits = {
        "bare": fit(), "bare again": fit(),
        "DynamicGradientCheckpointing": fit(DynamicGradientCheckpointing(1.0)),
    }  # fmt: skip
    return {name: runner.wall for name, runner in alternate(fits, steps, warmup).items()}
