"""Run by `torch.distributed.run`: fits with and without recomputation under each strategy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ext import DynamicGradientCheckpointing, ThreeDParallelStrategy
from lightning_ext._compat import LightningModule, pl
from lightning_ext.recompute import device
from tests.lightning_ext.recompute.models import Transformer


class Module(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        network = Transformer(blocks=4, dropout=0.1 if kind in ("ddp", "fsdp") else 0.0)
        parts = (network.embed, *network.blocks, network.norm, network.head)
        self.network = nn.Sequential(*parts)
        self.kind, self.losses, self.divided = kind, list[float](), False

    def configure_model(self) -> None:
        if self.kind == "fsdp" and not self.divided:
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for block in self.network[1:-2]:
                fully_shard(block, mesh=mesh)
            fully_shard(self.network, mesh=mesh)
            self.divided = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch[0]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Uneven:
    """Shorter sequences on the second rank, in its third batch, where that is what is tested.

    Args:
        kind: Of the strategy.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.batches = kind, 0

    def __call__(self, items: list[tuple[Tensor]]) -> list[Tensor]:
        self.batches += 1
        tokens = torch.stack([item[0] for item in items])
        short = self.kind == "fsdp" and dist.get_rank() == 1 and self.batches == 3
        return [tokens[:, :5] if short else tokens]


def strategy(kind: str) -> Any:
    if kind == "ddp":
        return pl.strategies.DDPStrategy(process_group_backend="gloo")
    if kind == "fsdp":
        return pl.strategies.ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        )
    if kind == "tensor":
        return ThreeDParallelStrategy(tensor=2)
    return ThreeDParallelStrategy(pipeline=2, microbatches=4)


def fit(kind: str, *callbacks: Any) -> list[float]:
    module = Module(kind)
    tokens = torch.randint(50, (80, 16), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy=strategy(kind),
        callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(tokens), 8, collate_fn=Uneven(kind)))
    return module.losses


def main(out: Path) -> None:
    found = {}
    device.memory_left = lambda _: 0 if dist.get_rank() else 10**12
    for kind in ("ddp", "fsdp", "pipeline", "tensor"):
        auto = kind == "tensor"  # where one rank has less memory than the other
        plain, callback = fit(kind), DynamicGradientCheckpointing("auto" if auto else 0.4)
        losses, report = fit(kind, callback), callback.report_
        assert report is not None
        found[kind] = {
            "same": plain == losses, "steps": len(plain), "predicted": report.plan.peak,
            "measured": report.measured, "extra": report.extra, "plain": report.plan.plain_peak,
        }  # fmt: skip
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
