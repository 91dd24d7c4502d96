"""Run by `torch.distributed.run`: fits cases and writes down what came out.

python -m torch.distributed.run --nproc-per-node 4 -m tests.lightning_ext.parallel.ranks DIR NAMES
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_ext import ThreeDParallelStrategy
from tests.lightning_ext.parallel.cases import FULL, QUICK, Case, everything
from tests.lightning_ext.parallel.models import WIDTH


def strategy_of(case: Case) -> ThreeDParallelStrategy:
    """The strategy of a case."""
    return ThreeDParallelStrategy(**case.layout)


def fit(case: Case, name: str, folder: Path) -> None:
    """Fit, and write down losses, weights and metrics."""
    strategy, module = strategy_of(case), case.module()
    trainer = case.trainer(devices=4, strategy=strategy)
    trainer.fit(module)
    state = strategy.lightning_module_state_dict()
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    everybody: list[object] = [None] * 4
    dist.all_gather_object(everybody, (metrics, module.seen))
    if dist.get_rank() == 0:
        torch.save({"state": state, "ranks": everybody}, folder / f"{name}.pt")


def resume(folder: Path) -> None:
    """Fit one epoch, save, go on in a new trainer; test the weights of the checkpoint."""
    case = QUICK["stages and pieces"]
    strategy, module = strategy_of(case), case.module()
    trainer = case.trainer(devices=4, strategy=strategy, max_epochs=1)
    trainer.fit(module)
    path = folder / "half.ckpt"
    trainer.save_checkpoint(path)
    module = case.module()
    trainer = case.trainer(devices=4, strategy=strategy_of(case))
    trainer.fit(module, ckpt_path=path)
    seen = module.seen
    (found,) = trainer.validate(module, ckpt_path=path, verbose=False)
    if dist.get_rank() == 0:
        torch.save({"seen": seen, "val_loss": found["val_loss"]}, folder / "resumed.pt")


def with_callbacks(folder: Path) -> None:
    """Fit with callbacks, on all ranks alike."""
    strategy = ThreeDParallelStrategy(pipeline=2, tensor=2, microbatches=4)
    found = everything(folder / "checkpoints", devices=4, strategy=strategy)
    everybody: list[object] = [None] * 4
    dist.all_gather_object(everybody, found)
    if dist.get_rank() == 0:
        torch.save(everybody, folder / "callbacks.pt")


def dropout(folder: Path) -> None:
    """Processes that nobody has seeded alike: what is whole on all ranks has to stay the same."""
    case = Case("gpt2", {"tensor": 4}, {"max_epochs": 1}, blocks=1)
    module = case.module()
    module.model.h[0].ln_2 = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.3))
    torch.manual_seed(int(os.environ["RANK"]))
    case.trainer(devices=4, strategy=strategy_of(case)).fit(module)
    everybody: list[object] = [None] * 4
    dist.all_gather_object(everybody, module.model.ln_f.weight.detach())
    if dist.get_rank() == 0:
        torch.save(everybody, folder / "dropout.pt")


def main(folder: Path, names: list[str]) -> None:
    """Run all."""
    for name in names:
        if name == "resume":
            resume(folder)
        elif name == "dropout":
            dropout(folder)
        elif name == "callbacks":
            with_callbacks(folder)
        else:
            fit((QUICK | FULL)[name], name, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
    dist.destroy_process_group()
