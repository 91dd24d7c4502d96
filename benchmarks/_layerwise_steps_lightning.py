"""Worker: alternating `Trainer.fit` steps, with and without `LayerwiseLRDecay`.

Run by `_layerwise_steps`, in a process of its own.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from benchmarks._baton import Pause, alternate
from benchmarks._layerwise_steps import DECAY, Case, Shape, serve
from benchmarks._networks import VisionTransformer
from lightning_ext import LayerwiseLRDecay

OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, foreach": {"foreach": True},
    "AdamW, fused": {"fused": True},
}


class Classifier(LightningModule):
    """`make` gets the network and returns the optimizer."""

    def __init__(self, net: nn.Module, make: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.net = net
        self.make = make

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.make(self.net)


class Repeat:
    """One batch, many times: loading data is not what is measured."""

    def __init__(self, batch: Any, times: int) -> None:
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * self.times)


class StepBegins(Callback):
    """Calls `pause` where a step begins."""

    def __init__(self, pause: Pause) -> None:
        self.pause = pause

    def on_train_batch_start(self, *args: Any) -> None:
        self.pause()


def level(name: str, blocks: int) -> int:
    """Depth of a parameter of `VisionTransformer`, as a user would write it."""
    if block := re.match(r"blocks\.(\d+)\.", name):
        return int(block[1]) + 1
    return blocks + 1 if name.startswith(("norm", "head")) else 0


def split_groups(net: VisionTransformer, exempt: bool) -> list[dict[str, Any]]:
    """Parameter groups for `DECAY` by hand, split for good.

    Args:
        net: The network.
        exempt: Whether biases and norms go without weight decay, which doubles the groups.
    """
    blocks = len(net.blocks)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, p in net.named_parameters():
        depth, plain = level(name, blocks), exempt and p.ndim <= 1
        settings = {"params": [], "lr": 1e-4 * DECAY ** (blocks + 1 - depth)}
        settings |= {"weight_decay": 0.0} if plain else {}
        groups.setdefault((depth, plain), settings)["params"].append(p)
    return list(groups.values())


@dataclass
class Fit:
    """One contestant: a network from a fixed seed, and how it is trained."""

    shape: Shape
    options: dict[str, Any]
    steps: int
    callback: LayerwiseLRDecay | None = None
    by_hand: bool = False
    exempt: bool = False

    def __post_init__(self) -> None:
        s = self.shape
        torch.manual_seed(0)
        self.net = VisionTransformer(s.image, s.patch, 3, s.width, s.blocks, s.heads)
        self.batch = torch.randn(s.batch, 3, s.image, s.image), torch.randint(10, (s.batch,))

    def __call__(self, pause: Pause) -> None:
        callbacks: list[Callback] = [StepBegins(pause)]
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*callbacks, self.callback] if self.callback else callbacks,
        )
        trainer.fit(Classifier(self.net, self.optimizer), Repeat(self.batch, self.steps))

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        by_hand = self.by_hand and isinstance(net, VisionTransformer)
        parameters = split_groups(net, self.exempt) if by_hand else net.parameters()
        return torch.optim.AdamW(parameters, lr=1e-4, **self.options)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def run(case: Case, steps: int, warmup: int, seed: int) -> dict[str, Any]:
    """Times of all contestants of a case, and what their weights prove."""
    common: dict[str, Any] = {
        "shape": case.shape,
        "options": OPTIONS[case.optimizer],
        "steps": warmup + steps + 1,
    }
    exempting = LayerwiseLRDecay(DECAY, no_decay_on_bias_and_norm=True)
    fits = {
        "bare": Fit(**common),
        "bare again": Fit(**common),
        "LayerwiseLRDecay": Fit(**common, callback=LayerwiseLRDecay(DECAY)),
        "groups split by hand": Fit(**common, by_hand=True),
        "LayerwiseLRDecay, biases exempt": Fit(**common, callback=exempting),
        "groups split by hand, biases exempt": Fit(**common, by_hand=True, exempt=True),
    }
    runners = alternate(fits, steps, warmup, seed)
    nets = {name: fit.net for name, fit in fits.items()}
    for ours in ("LayerwiseLRDecay", "LayerwiseLRDecay, biases exempt"):
        theirs = ours.replace("LayerwiseLRDecay", "groups split by hand")
        if not same_weights(nets[ours], nets[theirs]):
            raise AssertionError(f"{ours} and {theirs} learnt different weights")
        if same_weights(nets[ours], nets["bare"]):
            raise AssertionError(f"{ours} learnt what the bare fit did")
    return {
        "wall": {n: r.wall for n, r in runners.items()},
        "cpu": {n: r.cpu for n, r in runners.items()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    serve(run, sys.argv[1:])
