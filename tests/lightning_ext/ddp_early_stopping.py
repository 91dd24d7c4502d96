"""Run by torchrun on two ranks, whose metrics differ: they stop at the same step, by the mean."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.lightning_ext.curves import Follows, flat, follow, stopping


class Apart(Follows):
    """On rank 1 the metric gets better and better; the mean of both does not, after a while."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        apart = step * (1 if self.global_rank else -1)
        self.log("val_loss", torch.tensor(flat(step) + apart, dtype=torch.float64))


class Unknown(Follows):
    """Only rank 0 logs the metric."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.log("val_loss", 1.0, rank_zero_only=True)


def main(folder: Path) -> None:
    callback = stopping(restore_best=True)
    t = follow(callback, module=Apart(), strategy="ddp", devices=2)
    message = ""
    try:
        follow(stopping(), module=Unknown(), strategy="ddp", devices=2)
    except ValueError as error:
        message = str(error)
    rank = torch.distributed.get_rank()
    told = {
        "step": t.global_step,
        "values": callback.state_dict()["rule"],
        "decisions": [[d.step, d.action, d.reason] for d in callback.decisions_],
        "message": message,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
