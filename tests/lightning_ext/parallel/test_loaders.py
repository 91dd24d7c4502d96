"""The order of data where all ranks see all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ext import ThreeDParallelStrategy
from tests.lightning_ext.parallel.models import Module


class Shuffled(Module):
    """Notes the order in which it sees its data."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(blocks=1)
        self.options, self.order = options, []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data(), batch_size=8, **self.options)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.order += [tuple(row.tolist()) for row in batch[0]]
        return self.step(batch[0])


def order(options: dict[str, Any], **arguments: Any) -> list[Any]:
    """Of the rows in two epochs."""
    module = Shuffled(options)
    pl.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, **arguments,
    ).fit(module)  # fmt: skip
    return module.order


class TestOrder:
    """Where all ranks see all data; here there is one rank, which takes the same way."""

    @pytest.fixture(autouse=True)
    def _end(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        # What Lightning sets there would reach all processes that later tests start.
        monkeypatch.setattr(os, "environ", os.environ.copy())
        yield
        torch.distributed.destroy_process_group()

    def strategy(self) -> dict[str, Any]:
        return {"strategy": ThreeDParallelStrategy(data=1), "devices": 1}

    def test_what_is_not_shuffled_stays_in_order(self) -> None:
        assert order({"shuffle": False}, **self.strategy()) == order({"shuffle": False}, devices=1)

    def test_shuffled_by_seed_and_epoch_and_not_by_the_process(self) -> None:
        torch.manual_seed(1)
        first = order({"shuffle": True}, **self.strategy())
        torch.manual_seed(2)
        assert order({"shuffle": True}, **self.strategy()) == first
        assert sorted(first[:32]) == sorted(first[32:]) != first[:32] != first[32:]

    @pytest.mark.parametrize("how", ["generator", "off"])
    def test_the_users_own_way_is_left_alone(self, how: str) -> None:
        def options() -> dict[str, Any]:
            own = {"generator": torch.Generator().manual_seed(3)} if how == "generator" else {}
            torch.manual_seed(4)
            return {"shuffle": True, **own}

        left = {"use_distributed_sampler": False} if how == "off" else {}
        assert order(options(), **left, **self.strategy()) == order(options(), devices=1)
