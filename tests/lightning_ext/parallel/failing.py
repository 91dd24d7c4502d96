"""Fits that go wrong on some ranks, and what every rank then raises.

python -m torch.distributed.run --nproc-per-node 4 -m tests.lightning_ext.parallel.failing DIR
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from lightning_ext import ThreeDParallelStrategy
from tests.lightning_ext.parallel.models import Module

LAYOUT = {"pipeline": 2, "microbatches": 2}


class Broken(nn.Module):
    def __init__(self, inner: nn.Module, module: Failing) -> None:
        super().__init__()
        self.inner = inner
        object.__setattr__(self, "module", module)

    def forward(self, x: Tensor) -> Tensor:
        self.module.maybe("stage")
        if x.requires_grad:
            x.register_hook(lambda _: self.module.maybe("backward"))
        return self.inner(x)


class Failing(Module):
    """Raises once, on the given ranks, in the third step."""

    def __init__(self, where: str, ranks: tuple[int, ...]) -> None:
        other = where == "other model" and int(os.environ["RANK"]) in ranks
        super().__init__("gpt2", blocks=2 if other else 1)
        self.where, self.ranks, self.at = where, ranks, time.time()
        self.model.h[0].ln_1 = Broken(self.model.h[0].ln_1, self)

    def maybe(self, where: str) -> None:
        late = self.trainer.sanity_checking is False and self.global_step == 2
        if (
            where == self.where
            and dist.get_rank() in self.ranks
            and (late or where == "validation")
        ):
            self.at = time.time()
            raise KeyError(f"{where} went wrong")

    def step(self, batch: Tensor) -> Tensor:
        if self.where == "shorter" and self.global_step == 2:
            self.at = time.time()
            batch = batch[:, :-2]  # a batch of the same shape, but not inside
        return super().step(batch)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.where == "interrupt" and dist.get_rank() in self.ranks and self.global_step == 2:
            self.at = time.time()
            raise KeyboardInterrupt
        loss = super().training_step(batch, batch_idx)
        if self.where == "penalty" and self.global_step == 2:
            self.at = time.time()
            loss = loss + sum(p.square().sum() for p in self.parameters())
        self.maybe("training_step")
        if self.where == "twice" and self.global_step == 2:
            self.at = time.time()
            self.step(batch[0])
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.maybe("validation")
        return super().validation_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.maybe("hook")

    def train_dataloader(self) -> DataLoader[Any]:
        return self.shuffled("shuffled") or super().train_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self.shuffled("shuffled validation") or super().val_dataloader()

    def shuffled(self, where: str) -> DataLoader[Any] | None:
        """Batches in an order that differs by rank."""
        if where != self.where:
            return None
        self.at = time.time()
        data = self.data()
        order = torch.Generator().manual_seed(dist.get_rank())
        return DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=order))


CASES: dict[str, tuple[int, ...]] = {
    "training_step": (3,),
    "stage": (0,),
    "backward": (1,),
    "penalty": (2, 3),
    "interrupt": (1,),
    "twice": (2, 3),
    "validation": (1,),
    "hook": (2,),
    "shorter": (0, 1),
    "other model": (1,),
    "shuffled": (0, 1, 2, 3),
    "shuffled validation": (0, 1, 2, 3),
}


def attempt(where: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    """What this rank raises, and when."""
    module = Failing(where, ranks)
    trainer = pl.Trainer(
        devices=4, accelerator="cpu", max_epochs=2, logger=False, use_distributed_sampler=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        strategy=ThreeDParallelStrategy(**LAYOUT), num_sanity_val_steps=0,
    )  # fmt: skip
    try:
        trainer.fit(module)
    except (Exception, SystemExit) as error:
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        return {
            "kind": type(error).__name__, "frames": frames,
            "message": "; ".join([*getattr(error, "__notes__", ()), str(error)]),
            "raised": module.at, "caught": time.time(), "again": again(where),
        }  # fmt: skip
    return {"kind": "nothing"}


def again(where: str) -> str:
    """What a second fit says after the first has failed."""
    if where != "hook":
        return ""
    strategy = ThreeDParallelStrategy(**LAYOUT)
    trainer = pl.Trainer(
        devices=4, accelerator="cpu", strategy=strategy, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(Module("gpt2", blocks=1))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def port_of(shared: Path) -> str:
    """A port that nobody listens on: looked for by one rank, late, as others take ports, too."""
    if os.environ["RANK"] == "0":
        with socket.create_server(("127.0.0.1", 0)) as server:
            chosen = shared.with_suffix(".chosen")
            chosen.write_text(str(server.getsockname()[1]))
        chosen.rename(shared)
    while not shared.exists():
        time.sleep(0.01)
    return shared.read_text()


def main(folder: Path) -> None:
    """Try all cases, each with new connections."""
    rank = os.environ["RANK"]
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for where, ranks in CASES.items():
        os.environ["MASTER_PORT"] = port_of(folder / f"{where}.port")
        (folder / f"{where}.{rank}.json").write_text(json.dumps(attempt(where, ranks)))
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
