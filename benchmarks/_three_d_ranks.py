"""Run by `torch.distributed.run`: steps of `ThreeDParallelStrategy` and of a script, in turns."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks._three_d_by_hand import ByHand, loss_of, model
from lightning_ext import ThreeDParallelStrategy
from lightning_ext.parallel import describe
from lightning_ext.parallel.parts import find_pipeline
from strategies.parallel import partition


class Module(pl.LightningModule):
    """As a user writes it."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        names = ("width", "blocks", "heads", "vocabulary")
        self.network = model(**{name: case[name] for name in names})

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Turns(pl.Callback):
    """After each step of the Trainer one of the script, on a batch of its own loader.

    Args:
        script: What is compared with.
        batches: Of the script.
    """

    def __init__(self, script: ByHand, batches: DataLoader[Any]) -> None:
        self.script, self.batches = script, iter(batches)
        self.times: list[tuple[float, float]] = []
        self.losses: list[tuple[float, float]] = []
        self.began: float | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """End of a step of the Trainer: from the end of the script's step until now."""
        loss = float(outputs["loss"])
        dist.barrier()
        before = time.perf_counter()
        theirs = self.script.step(*next(self.batches))
        dist.barrier()
        now = time.perf_counter()
        if self.began is not None:
            self.times.append((before - self.began, now - before))
        if theirs is not None:
            self.losses.append((loss, theirs))
        self.began = time.perf_counter()


def loader(case: dict[str, Any]) -> DataLoader[Any]:
    """Random tokens; every copy of the model has its own."""
    generator = torch.Generator().manual_seed(1)
    size = (case["items"] * case["steps"], case["length"] + 1)
    tokens = torch.randint(case["vocabulary"], size, generator=generator)
    _, dp, tp = case["layout"]
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    rank = dist.get_rank() // tp % dp
    sampler: Any = DistributedSampler(data, num_replicas=dp, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=case["items"] // dp, sampler=sampler)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Times of the steps of both on rank zero, and the losses of the last stage."""
    pp, dp, tp = case["layout"]
    module = Module(case)
    counts = [case["blocks"] + 3]
    if pp > 1:
        parts = find_pipeline(module, "network", pp).parts
        counts = list(partition(describe.costs(parts), pp))
    script = ByHand(Module(case).network, (pp, dp, tp), counts, case["microbatches"])
    turns = Turns(script, loader(case))
    trainer = pl.Trainer(
        devices=pp * dp * tp, accelerator="cpu", callbacks=[turns], max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
        strategy=ThreeDParallelStrategy(
            pp, tp, dp, case["microbatches"] if pp > 1 else 1,
            layers_per_stage=counts if pp > 1 else None,
        ),
    )  # fmt: skip
    trainer.fit(module, loader(case))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, max((abs(a - b) for a, b in turns.losses), default=0.0))
    return {"times": turns.times[case["warmup"] :], "apart": max(found), "counts": counts}


def main(plan: Path, out: Path) -> None:
    """Measure all cases of a plan."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = [{**case, **measure(case)} for case in json.loads(plan.read_text())]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
