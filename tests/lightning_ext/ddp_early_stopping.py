"""Run by torchrun on two ranks, whose metrics differ: they stop at the same step, by the mean."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from tests.lightning_ext.curves import Follows, flat, follow, stopping


class Apart(Follows):
    """On rank 1 the metric gets better and better; the mean of both does not, after a while."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        apart = step * (1 if self.global_rank else -1)
        self.log("val_loss", torch.tensor(flat(step) + apart, dtype=torch.float64))


class LossApart(Apart):
    """The loss differs, too."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.global_rank)


class SavesInEpoch(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 8:
            trainer.save_checkpoint(self.path)


class SavesInValidation(SavesInEpoch):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        pass

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == 9:
            trainer.save_checkpoint(self.path)


def resumed(folder: Path) -> list[Any]:
    """The values of a straight run, and of those that went on from its checkpoints."""
    values = []
    for ckpt in (None, folder / "batch.ckpt", folder / "validation.ckpt"):
        callback = stopping(min_improvement=0.0)
        callbacks: list[Any] = [callback]
        if ckpt is None:
            saves = [
                SavesInValidation(folder / "validation.ckpt"),
                SavesInEpoch(folder / "batch.ckpt"),
            ]
            callbacks = [saves[0], callback, saves[1]]
        options = {"strategy": "ddp", "devices": 2, "max_epochs": 5}
        follow(*callbacks, module=LossApart(), ckpt=ckpt and str(ckpt), **options)
        values.append(callback.state_dict()["rule"])
    return values


class Unknown(Follows):
    """Only rank 0 logs the metric."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.log("val_loss", 1.0, rank_zero_only=True)


def main(folder: Path) -> None:
    callback = stopping(restore_best=True)
    t = follow(callback, module=Apart(), strategy="ddp", devices=2)
    message = ""
    try:
        follow(stopping(), module=Unknown(), strategy="ddp", devices=2)
    except ValueError as error:
        message = str(error)
    after = resumed(folder)
    rank = torch.distributed.get_rank()
    told = {
        "step": t.global_step,
        "values": callback.state_dict()["rule"],
        "decisions": [[d.step, d.action, d.reason] for d in callback.decisions_],
        "message": message,
        "resumed": after,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
