"""A small network, its data, and an optimizer that tells at which rate each parameter learnt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ext import LayerwiseLRDecay

LEVELS = 4  # of `Net`: embed, two blocks, head


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Stem, two residual blocks, final norm and head: four levels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def depth(name: str) -> int:
    """Depth of a parameter of `Net`, said by hand."""
    for part, level in (("embed", 0), ("blocks.0", 1), ("blocks.1", 2)):
        if part in name:
            return level
    return 3


class Module(LightningModule):
    """`make` gets the module and returns what `configure_optimizers` returns."""

    def __init__(self, make: Callable[[LightningModule], Any], net: nn.Module | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.net = net if net is not None else Net()
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.make(self)


class ValidatedModule(Module):
    """A `Module` that also validates, tests and predicts."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


class SpySGD(torch.optim.SGD):
    """Records, at every step, the rate and the weight decay that each parameter gets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates: list[dict[int, float]] = []
        self.decays: list[dict[int, float]] = []
        self.copies: list[int] = []

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for record, key in ((self.rates, "lr"), (self.decays, "weight_decay")):
            record.append({id(p): g[key] for g in self.param_groups for p in g["params"]})
        self.copies.append(len(self.param_groups))
        return loss


def loader(batch_size: int = 8, size: int = 48, dtype: torch.dtype = torch.float32) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator, dtype=dtype)
    y = torch.randint(0, 3, (size,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def trainer(*callbacks: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = dict(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def decay(value: float = 0.5, **options: Any) -> LayerwiseLRDecay:
    return LayerwiseLRDecay(value, **options)
