"""Run by `torch.distributed.run`: fits cases and writes down what came out.

python -m torch.distributed.run --nproc-per-node 4 -m tests.lightning_ext.parallel.ranks DIR NAMES
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_ext import ThreeDParallelStrategy
from lightning_ext.parallel.mesh import Mesh
from tests.lightning_ext.parallel.cases import CASES, QUICK, SPLIT, Case, everything
from tests.lightning_ext.parallel.models import WIDTH

_MESHES: dict[tuple[int, int], Mesh | None] = {}


def strategy_of(case: Case) -> ThreeDParallelStrategy:
    """The strategy of a case, with the process groups of an earlier one of the same layout.

    The threads of each group of gloo wake up all the time, and those of a hundred slow all down.
    """
    strategy = ThreeDParallelStrategy(**case.layout)
    strategy.mesh = _MESHES.get((strategy.pipeline, strategy.tensor))
    return strategy


def of_all(value: Any) -> list[Any]:
    """What all ranks have."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


def save(value: Any, path: Path) -> None:
    """Write on rank zero."""
    if dist.get_rank() == 0:
        torch.save(value, path)


def different(module: nn.Module, tensor_rank: int) -> list[str]:
    """Parameters of which two ranks that hold the same piece hold different values."""
    here = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        piece = p.to_local() if isinstance(p, DTensor) else p
        split = isinstance(p, DTensor) and p.placements[0].is_shard()
        if not piece.is_meta:
            here[name, tensor_rank if split else None] = piece.detach()
    found: dict[Any, torch.Tensor] = {}
    return [
        f"{key[0]} on rank {rank}"
        for rank, held in enumerate(of_all(here))
        for key, value in held.items()
        if not torch.equal(found.setdefault(key, value), value)
    ]


def fit(case: Case, name: str, folder: Path) -> None:
    """Fit, and write down losses, norms, weights and metrics."""
    strategy, module = strategy_of(case), case.module()
    trainer = case.trainer(devices=case.world, strategy=strategy)
    trainer.fit(module)
    mesh, engine = strategy.mesh, strategy._engine
    _MESHES[strategy.pipeline, strategy.tensor] = mesh
    assert mesh is not None
    assert engine is not None
    differing = different(module, mesh.tensor_rank)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    found = {
        "state": strategy.lightning_module_state_dict(),
        "ranks": of_all((metrics, module.seen, module.norms)),
        "parts": of_all(len(engine.parts)),
        "dtypes": sorted(set().union(*of_all(module.dtypes))),
        "different": differing,
    }
    save(found, folder / f"{name}.pt")


RESUMED = ("stages and pieces", "stages")


def resume(folder: Path) -> None:
    """Fit one epoch, save, go on in a new trainer; test the weights of the checkpoint."""
    for name in RESUMED:
        _resume(QUICK[name], folder / f"{name} resumed")


def _resume(case: Case, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    strategy, module = strategy_of(case), case.module()
    trainer = case.trainer(devices=4, strategy=strategy, max_epochs=1)
    trainer.fit(module)
    path = folder / "half.ckpt"
    trainer.save_checkpoint(path)
    module = case.module()
    trainer = case.trainer(devices=4, strategy=strategy_of(case))
    trainer.fit(module, ckpt_path=path)
    seen, mesh = module.seen, trainer.strategy.mesh  # type: ignore[attr-defined]
    (found,) = trainer.validate(module, ckpt_path=path, verbose=False)
    assert trainer.strategy.mesh is mesh  # type: ignore[attr-defined]
    save({"seen": seen, "val_loss": found["val_loss"]}, folder / "found.pt")


def with_callbacks(folder: Path) -> None:
    """Fit with callbacks, on all ranks alike."""
    strategy = ThreeDParallelStrategy(pipeline=2, tensor=2, microbatches=4)
    save(
        of_all(everything(folder / "checkpoints", devices=4, strategy=strategy)),
        folder / "callbacks.pt",
    )


def dropout(folder: Path) -> None:
    """Processes that nobody has seeded alike: what is whole on all ranks has to stay the same."""
    case = Case("gpt2", {"tensor": 4}, {"max_epochs": 1}, blocks=1)
    module = case.module()
    module.model.h[0].mlp.append(nn.Dropout(0.3))  # of the sum of what the ranks have
    module.model.h[0].ln_2 = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.3))
    torch.manual_seed(int(os.environ["RANK"]))
    case.trainer(devices=4, strategy=strategy_of(case)).fit(module)
    save(of_all(module.model.ln_f.weight.detach()), folder / "dropout.pt")


def noise(folder: Path) -> None:
    """Processes that nobody has seeded alike, whose steps draw the inputs and the targets."""
    case = Case("noisy", {"pipeline": 2, "microbatches": 2}, {"max_epochs": 2})
    strategy, module = strategy_of(case), case.module()
    torch.manual_seed(int(os.environ["RANK"]))
    trainer = case.trainer(devices=4, strategy=strategy)
    trainer.fit(module)
    state = strategy.lightning_module_state_dict()
    everybody = of_all((module.drawn, module.used, float(trainer.callback_metrics["val_loss"])))
    save({"state": state, "ranks": everybody}, folder / "noise.pt")


def divided(folder: Path) -> None:
    """What a divided module says when it is used by itself."""
    case = Case("gpt2", SPLIT, {"max_epochs": 1}, blocks=1)
    strategy, module = strategy_of(case), case.module()
    case.trainer(devices=4, strategy=strategy).fit(module)
    with warnings.catch_warnings(record=True) as own:
        warnings.simplefilter("always")
        strategy.lightning_module_state_dict()
    said = []
    for part in (module, module.model):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            part.state_dict()
        said.append([str(w.message) for w in found])
    try:
        module.model(torch.zeros(1, 2, dtype=torch.long))
    except RuntimeError as error:
        called = str(error)
    save(of_all((len(own), said, called)), folder / "divided.pt")


JOBS = {
    "divided": divided,
    "resume": resume,
    "callbacks": with_callbacks,
    "dropout": dropout,
    "noise": noise,
}


def main(folder: Path, names: list[str]) -> None:
    """Run all."""
    for name in names:
        if name in JOBS:
            JOBS[name](folder)
        else:
            fit(CASES[name], name, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
    dist.destroy_process_group()
