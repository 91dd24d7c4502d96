"""A short fit that writes down where each process is, started in any way.

python -m tests.lightning_ext.parallel.launched DIR NODES DEVICES
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_ext import ThreeDParallelStrategy
from tests.lightning_ext.parallel.models import Module


def fit(**arguments: object) -> Module:
    """Fit for one epoch."""
    module = Module("gpt2", blocks=1)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, num_sanity_val_steps=0, limit_val_batches=0,
        **arguments,  # type: ignore[arg-type]
    )  # fmt: skip
    trainer.fit(module)
    return module


def main(folder: Path, nodes: int, devices: int) -> None:
    """Fit on two stages, and write down what came out."""
    strategy = ThreeDParallelStrategy(pipeline=2, microbatches=2)
    module = fit(strategy=strategy, num_nodes=nodes, devices=devices)
    found = {
        "environment": type(strategy.cluster_environment).__name__,
        "rank": strategy.global_rank,
        "node": strategy.node_rank,
        "local": strategy.local_rank,
        "world": dist.get_world_size(),
        "at": asdict(strategy.layout.coordinates(strategy.global_rank)),
        "zero": module.trainer.is_global_zero,
        "seen": module.seen,
    }
    (folder / f"{strategy.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    dist.destroy_process_group()
