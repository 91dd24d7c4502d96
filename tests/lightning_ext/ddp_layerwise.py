"""Run by torchrun on two ranks: ours and permanently split groups under one strategy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from tests.lightning_ext.callbacks.test_rates import by_hand
from tests.lightning_ext.helpers import Module, decay, loader, trainer

ADAMW = {"lr": 0.01, "weight_decay": 0.3}


class Sharded(Module):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


STRATEGIES: dict[str, tuple[Callable[[], Any], type[Module]]] = {
    "ddp": (lambda: "ddp", Module),
    "fsdp2": (lambda: ModelParallelStrategy(2, 1, process_group_backend="gloo"), Sharded),
}


def train(name: str, make: Any, *callbacks: Any) -> dict[str, torch.Tensor]:
    strategy, kind = STRATEGIES[name]
    module = kind(make)
    t = trainer(*callbacks, accumulate_grad_batches=2, strategy=strategy(), devices=2)
    t.fit(module, loader())
    assert t.world_size == 2
    whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p  # noqa: E731
    return {name: whole(p.detach()).clone() for name, p in module.named_parameters()}


def main(name: str, folder: Path) -> None:
    ours = train(name, lambda m: torch.optim.AdamW(m.parameters(), **ADAMW), decay(0.6))
    hand = train(name, lambda m: by_hand(m, torch.optim.AdamW, 0.6, **ADAMW))
    rank = torch.distributed.get_rank()
    torch.save({"ours": ours, "hand": hand}, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
