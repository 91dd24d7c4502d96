"""Layouts and options that are run on real ranks and on one process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_ext import LayerwiseLRDecay, PredictiveEarlyStopping
from tests.lightning_ext.parallel.models import HEADS, Elaborate, Module
from tests.lightning_ext.parallel.oddities import (
    Biased,
    Careless,
    Even,
    Extreme,
    Flat,
    Mixed,
    Noisy,
    Thawed,
    Twice,
    Uneven,
)
from tests.lightning_ext.parallel.unmodified import Bert, Demo, Sequential

KINDS = {
    "masked": Elaborate, "sequential": Sequential, "bert": Bert, "demo": Demo, "flat": Flat,
    "noisy": Noisy, "biased": Biased, "thawed": Thawed, "extreme": Extreme,
    "careless": Careless, "mixed": Mixed, "twice": Twice,
    "even": Even, "uneven": Uneven,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A fit on some ranks.

    Args:
        kind: Of the model.
        layout: Arguments of the strategy.
        options: Arguments of the Trainer.
        blocks: Of the model.
        items: Of the data.
        batch: Items of all copies together in a batch.
        heads: Of attention; the model is four times as wide.
        world: Ranks.
    """

    kind: str
    layout: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    blocks: int = 3
    items: int = 32
    batch: int = 8
    heads: int = HEADS
    world: int = 4

    def trainer(self, **arguments: Any) -> pl.Trainer:
        """Trainer for it."""
        defaults: dict[str, Any] = {
            "accelerator": "cpu", "max_epochs": 2, "logger": False, "precision": "64-true",
            "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False, "use_distributed_sampler": False,
        }  # fmt: skip
        return pl.Trainer(**{**defaults, **self.options, **arguments})

    def module(self) -> Any:
        """Model for it."""
        kind: Any = KINDS.get(self.kind, Module)
        return kind(self.kind, self.blocks, self.items, self.batch, self.heads)

    @property
    def alone(self) -> Case:
        """The same on one process."""
        return replace(self, layout={}, world=1)


def everything(folder: Path, **arguments: Any) -> dict[str, Any]:
    """Fit with callbacks, validate and test the best checkpoint, predict: what came out."""
    best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2)
    stopping = EarlyStopping("val_loss", min_delta=1.0, patience=1)
    ours = [LayerwiseLRDecay(0.8), PredictiveEarlyStopping("val_loss")]
    case = Case("gpt2", {}, {"max_epochs": 8, "enable_checkpointing": True}, blocks=2)
    callbacks = [best, stopping, *ours]
    trainer, module = case.trainer(callbacks=callbacks, **arguments), case.module()
    trainer.fit(module)
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    epoch = trainer.current_epoch
    (validated,) = trainer.validate(module, ckpt_path="best", verbose=False)
    (tested,) = trainer.test(module, ckpt_path="best", verbose=False)
    predicted = trainer.predict(module)
    assert predicted is not None
    return {
        "sane": module.sane,
        "epoch": epoch,
        "stopped": stopping.stopped_epoch,
        "seen": module.seen,
        "logged": logged,
        "best": Path(best.best_model_path).name,
        "val_loss": validated["val_loss"],
        "test_loss": tested["test_loss"],
        "predicted": [int(x) for x in torch.cat(predicted).flatten()],  # type: ignore[arg-type]
    }


CLIP = {"gradient_clip_val": 0.5}
VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
ONCE, SINGLE, MIXED = {"max_epochs": 1}, {"precision": "32-true"}, {"precision": "bf16-mixed"}
TWO = {"pipeline": 2, "microbatches": 2}
FOUR = {"pipeline": 4, "microbatches": 4}
SPLIT = {"pipeline": 2, "tensor": 2, "microbatches": 4}


def accumulating(layout: dict[str, Any], steps: int, epochs: int = 2) -> Case:
    """Gradients of several batches, which together are always of the same size."""
    options = CLIP | {"accumulate_grad_batches": steps, "max_epochs": epochs}
    return Case("gpt2", layout, options, batch=8 // steps)


QUICK = {
    "stages": Case("gpt2", FOUR, CLIP, blocks=8),
    "data": Case("gpt2", {}, CLIP),
    "data of several batches": accumulating({}, 2),
    "copies that talk in the backward pass": Case("even", {}, CLIP),
    "a backward of one's own": Case("uneven", {}, CLIP),
    "gradients that come twice": Case("twice", {}, CLIP, blocks=2),
    "stages and data": Case("vit", TWO, CLIP | {"accumulate_grad_batches": 2}),
    "stages and pieces": Case("gpt2", {**SPLIT, "schedule": "gpipe"}, CLIP),
    "pieces and data": Case("llama", {"tensor": 2}, CLIP),
    "pieces": Case("vit", {"tensor": 4}, VALUE, blocks=1),
    "mask and parameters outside": Case("masked", FOUR, CLIP),
    "single precision": Case("gpt2", {"pipeline": 2}, SINGLE),
    "mixed precision": Case("gpt2", SPLIT, MIXED | ONCE),
    "a last batch of three": Case("vit", FOUR, CLIP | ONCE, items=27),
    "microbatches that do not divide": Case("gpt2", TWO | {"microbatches": 3}, ONCE),
    "microbatches alone": Case("gpt2", {"microbatches": 2}, ONCE),
    "seven layers": Case("gpt2", FOUR, ONCE, blocks=7),
    "no parameters in the middle": Case("flat", {**FOUR, "layers_per_stage": [2, 1, 1, 1]}),
    "no parameters at the ends": Case("flat", {**FOUR, "layers_per_stage": [1, 2, 1, 1]}),
    "values clipped": Case("gpt2", SPLIT, VALUE | ONCE),
    "sequential": Case("sequential", SPLIT, CLIP | ONCE),
    "bert": Case("bert", SPLIT, CLIP | ONCE),
    "demo": Case("demo", TWO, CLIP | ONCE, blocks=2),
    "learned biases of attention": Case("biased", {"tensor": 2}, CLIP, blocks=2),
    "whole layers in between": Case("mixed", {"tensor": 4}, CLIP, blocks=2),
    "layers that are trained later": Case(
        "thawed", {**TWO, "layers_per_stage": [2, 4]}, CLIP | {"accumulate_grad_batches": 2}
    ),
    "extremes over copies": Case("extreme", TWO, ONCE),
    "batches and inputs written to": Case(
        "careless", {**FOUR, "layers_per_stage": [3, 1, 1, 2]}, {"max_epochs": 4}
    ),
}


def layouts(world: int) -> list[tuple[int, int, str]]:
    """Every pipeline, tensor and schedule on so many ranks; one stage needs no schedule."""
    sizes = [p for p in range(1, world + 1) if world % p == 0]
    return [
        (p, t, schedule)
        for p, t in product(sizes, sizes)
        if world % (p * t) == 0
        for schedule in ("gpipe", "1f1b")[: 2 if p > 1 else 1]
    ]


def matrix(
    world: int, kinds: dict[str, list[tuple[int, int, str]]], precision: str
) -> dict[str, Case]:
    """Twenty steps with eight blocks and eight heads."""
    options = CLIP | {"max_epochs": 5, "check_val_every_n_epoch": 5, "precision": precision}
    return {
        f"{kind}, {p} x {world // (p * t)} x {t}, {schedule}, {precision}": Case(
            kind,
            {"pipeline": p, "tensor": t, "schedule": schedule}
            | ({"microbatches": max(4, p)} if p > 1 else {}),
            options,
            blocks=8,
            heads=8,
            world=world,
        )
        for kind, found in kinds.items()
        for p, t, schedule in found
    }


def named(name: str, layouts: dict[str, dict[str, Any]], case: Case) -> dict[str, Case]:
    """A case in several layouts."""
    return {f"{name}, {at}": replace(case, layout=layout) for at, layout in layouts.items()}


AT = {"2 x 1 x 2": SPLIT, "2 x 2 x 1": TWO, "4 x 1 x 1": FOUR, "1 x 2 x 2": {"tensor": 2}}
ACCUMULATED = {
    f"{steps} batches, {at}": accumulating(AT[at], steps, epochs=3)
    for at, steps in product(("2 x 1 x 2", "2 x 2 x 1", "1 x 2 x 2"), (1, 2, 4))
}
FULL = {
    **matrix(4, dict.fromkeys(("gpt2", "vit", "llama"), layouts(4)), "64-true"),
    **matrix(4, {"gpt2": layouts(4)}, "32-true"),
    **named("values clipped", AT, Case("gpt2", {}, VALUE)),
    **named("mixed precision", AT, Case("gpt2", {}, MIXED)),
    **named("sequential", AT, Case("sequential", {}, CLIP, blocks=6)),
    **named("bert", AT, Case("bert", {}, CLIP, blocks=6)),
    **named("demo", AT, Case("demo", {}, CLIP)),
    **ACCUMULATED,
    "seven parts": Case("sequential", FOUR, CLIP, blocks=4),
    "a batch of two": Case("gpt2", FOUR, ONCE, items=8, batch=2),
    "six items in microbatches": Case("gpt2", TWO | {"microbatches": 8}, items=36, batch=12),
}
EIGHT = {
    **matrix(8, {"gpt2": layouts(8)}, "64-true"),
    # Both schedules add up the same numbers in the same order: one of them is enough here.
    **matrix(8, {"gpt2": [at for at in layouts(8) if at[0] == 1 or at[2] == "1f1b"]}, "32-true"),
    **matrix(8, {"llama": [(2, 2, "1f1b"), (1, 4, "gpipe")]}, "64-true"),
    **matrix(8, {"vit": [(2, 2, "gpipe"), (4, 1, "1f1b"), (1, 8, "gpipe")]}, "64-true"),
}
CASES = QUICK | FULL | EIGHT
