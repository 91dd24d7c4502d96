"""Layouts and options that are run on real ranks and on one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_ext import LayerwiseLRDecay, PredictiveEarlyStopping
from tests.lightning_ext.parallel.models import Elaborate, Module


@dataclass(frozen=True)
class Case:
    """A fit on some ranks.

    Args:
        kind: Of the model.
        layout: Arguments of the strategy.
        options: Arguments of the Trainer.
        blocks: Of the model.
        items: Of the data; there are eight in a batch.
    """

    kind: str
    layout: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    blocks: int = 3
    items: int = 32

    def trainer(self, **arguments: Any) -> pl.Trainer:
        """Trainer for it."""
        defaults: dict[str, Any] = {
            "accelerator": "cpu", "max_epochs": 2, "logger": False, "precision": "64-true",
            "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False, "use_distributed_sampler": False,
        }  # fmt: skip
        return pl.Trainer(**{**defaults, **self.options, **arguments})

    def module(self) -> Module:
        """Model for it."""
        module = (Elaborate if self.kind == "masked" else Module)(self.kind, self.blocks)
        module.items = self.items
        return module


def everything(folder: Path, **arguments: Any) -> dict[str, Any]:
    """Fit with callbacks, test the best checkpoint, predict: what came out."""
    best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2)
    ours = [LayerwiseLRDecay(0.8), PredictiveEarlyStopping("val_loss")]
    case = Case("gpt2", {}, {"max_epochs": 8, "enable_checkpointing": True})
    callbacks = [best, EarlyStopping("val_loss", patience=2), *ours]
    trainer, module = case.trainer(callbacks=callbacks, **arguments), case.module()
    trainer.fit(module)
    epoch = trainer.current_epoch
    (tested,) = trainer.test(module, ckpt_path="best", verbose=False)
    predicted = trainer.predict(module)
    assert predicted is not None
    return {
        "epoch": epoch,
        "seen": module.seen,
        "best": Path(best.best_model_path).name,
        "test_loss": tested["test_loss"],
        "predicted": [int(x) for x in torch.cat(predicted).flatten()],  # type: ignore[arg-type]
    }


CLIP, ACCUMULATE = {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2}
QUICK = {
    "stages": Case("gpt2", {"pipeline": 4, "microbatches": 4}, CLIP, blocks=8),
    "data": Case("gpt2", {}, ACCUMULATE),
    "stages and data": Case("vit", {"pipeline": 2, "microbatches": 2}, CLIP | ACCUMULATE),
    "stages and pieces": Case(
        "gpt2", {"pipeline": 2, "tensor": 2, "microbatches": 4, "schedule": "gpipe"}, CLIP
    ),
    "pieces and data": Case("llama", {"tensor": 2}, CLIP),
    "pieces": Case("vit", {"tensor": 4}, blocks=1),
    "mask and parameters outside": Case("masked", {"pipeline": 4, "microbatches": 4}, CLIP),
    "single precision": Case("gpt2", {"pipeline": 2}, {"precision": "32-true"}),
    "a last batch of three": Case(
        "vit", {"pipeline": 4, "microbatches": 4}, {"gradient_clip_val": 0.5}, items=27
    ),
    "microbatches alone": Case("gpt2", {"microbatches": 2}),
}
FULL = {
    f"{kind}, {p} x {4 // (p * t)} x {t}, {schedule}": Case(
        kind, {"pipeline": p, "tensor": t, "microbatches": 4, "schedule": schedule}, CLIP, blocks=8
    )
    for kind, (p, t), schedule in product(
        ("gpt2", "vit", "llama"), ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1)), ("gpipe", "1f1b")
    )
}
