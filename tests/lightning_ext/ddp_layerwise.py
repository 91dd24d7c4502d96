"""Run by torchrun on two ranks: ours and permanently split groups under DDP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.lightning_ext.callbacks.test_rates import by_hand
from tests.lightning_ext.helpers import Module, decay, loader, trainer, weights


def train(make: Any, *callbacks: Any) -> dict[str, torch.Tensor]:
    module = Module(make)
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": True}
    t = trainer(*callbacks, accumulate_grad_batches=2, **options)
    t.fit(module, loader())
    assert t.world_size == 2
    return weights(module)


def main(folder: Path) -> None:
    options = {"lr": 0.01, "weight_decay": 0.3}
    ours = train(lambda m: torch.optim.AdamW(m.parameters(), **options), decay(0.6))
    hand = train(lambda m: by_hand(m, torch.optim.AdamW, 0.6, **options))
    rank = torch.distributed.get_rank()
    torch.save({"ours": ours, "hand": hand}, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
