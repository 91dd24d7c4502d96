"""A model that logs torchmetrics objects, fitted on one process or on ranks; one with batch norm.

python -m torch.distributed.run --nproc-per-node 4 -m tests.lightning_ext.parallel.measured DIR
"""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassRecall,
)

from lightning_ext import ThreeDParallelStrategy
from tests.lightning_ext.parallel.models import VOCABULARY, Module
from tests.lightning_ext.parallel.normalized import on_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": {"pipeline": 4, "microbatches": 4},
    "stages and data": {"pipeline": 2, "microbatches": 2},
    "pieces and data": {"tensor": 2, "microbatches": 2},
    "data": {},
}


class Measured(Module):
    """Metric objects in all steps, logged and not."""

    def __init__(self) -> None:
        super().__init__("gpt2", blocks=2, items=16)
        several = MetricCollection(
            {"f1": MulticlassF1Score(VOCABULARY), "recall": MulticlassRecall(VOCABULARY)}
        )
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")
        self.several = several.clone("train_")
        self.area = BinaryAUROC()  # without thresholds: lists of all predictions
        self.range = MinMaxMetric(MulticlassAccuracy(VOCABULARY, average="micro"))
        self.kept = MeanMetric()
        self.kept.persistent(True)
        self.val_accuracy = MulticlassAccuracy(VOCABULARY, average="micro")
        self.val_several = several.clone("val_")
        self.val_area = BinaryAUROC()
        self.steps: list[dict[str, float]] = []
        self.ranges: list[dict[str, float]] = []

    def scored(self, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        targets = batch[:, 1:].flatten()
        logits = self.model(batch[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, targets), logits.detach(), targets

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss, logits, targets = self.scored(batch[0])
        self.accuracy(logits, targets)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.several(logits, targets)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        self.area(logits[:, 0].sigmoid(), (targets == 0).int())
        self.log("area", self.area, on_step=False, on_epoch=True)
        self.range.update(logits, targets)
        self.kept.update(loss.detach())
        self.log("plain", loss.detach(), sync_dist=True)
        items = float(len(targets))
        self.log("items", items, on_epoch=True, on_step=False, reduce_fx=torch.sum, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        found = self.range.compute()
        self.ranges.append({name: float(value) for name, value in found.items()})
        self.log("from_hook", found["max"])
        self.range._base_metric.reset()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.evaluated(batch[0])

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluated(batch[0])

    def evaluated(self, batch: Tensor) -> Tensor:
        loss, logits, targets = self.scored(batch)
        self.val_accuracy(logits, targets)
        self.log("val_accuracy", self.val_accuracy, on_step=True, on_epoch=True)
        self.val_several.update(logits, targets)
        self.log_dict(self.val_several)
        self.val_area.update(logits[:, 0].sigmoid(), (targets == 0).int())
        self.log("val_area", self.val_area)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        found = self.trainer.callback_metrics
        self.steps.append({name: float(found[name]) for name in ("accuracy_step", "plain")})


def measure(**arguments: Any) -> dict[str, Any]:
    """Fit, test, and return everything that was logged."""
    module = Measured()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **arguments,
    )  # fmt: skip
    trainer.fit(module)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    state = trainer.strategy.lightning_module_state_dict()
    copied = copy.deepcopy(module.area)
    assert type(pickle.loads(pickle.dumps(module.area))) is type(copied)
    (tested,) = trainer.test(module, verbose=False)
    return {
        "fitted": fitted,
        "steps": module.steps,
        "ranges": module.ranges,
        "tested": dict(tested),
        "kept": {name: float(value) for name, value in state.items() if name.startswith("kept")},
    }


def main(folder: Path) -> None:
    """Run all layouts, on all ranks."""
    for name, layout in LAYOUTS.items():
        strategy = ThreeDParallelStrategy(**layout)
        found = measure(devices=4, strategy=strategy)
        assert strategy._engine is not None
        found["objects"] = strategy._engine.sharing.objects
        gather(found, folder / f"{name}.pt")
    gather(on_ranks(), folder / "normalized.pt")


def gather(found: Any, path: Path) -> None:
    """Write down what all ranks have found."""
    everybody: list[Any] = [None] * 4
    dist.all_gather_object(everybody, found)
    if dist.get_rank() == 0:
        torch.save(everybody, path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
