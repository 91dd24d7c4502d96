"""Pretraining, and fine-tuning through `Trainer.fit`; see `_layerwise_gain`."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._layerwise_steps_lightning import Classifier
from benchmarks._networks import ConvolutionalNetwork, VisionTransformer
from lightning_ext import LayerwiseLRDecay

PRETRAIN_RATE, PRETRAIN_BATCH, BATCH = 1e-3, 32, 10


def network(name: str, classes: int) -> nn.Module:
    """One of `_layerwise_gain.NETWORKS` for images of 8 x 8 pixels."""
    if name == "vision transformer":
        return VisionTransformer(8, 2, channels=1, width=48, blocks=6, heads=3, classes=classes)
    return ConvolutionalNetwork(channels=1, width=32, blocks=4, classes=classes)


def pretrained(
    name: str, images: np.ndarray, labels: np.ndarray, epochs: int, seed: int
) -> tuple[nn.Module, float]:
    """A network trained from scratch on nine tenths of the samples, and its accuracy on the rest.

    Args:
        name: Of the network.
        images: To train on.
        labels: Their classes, from 0 upwards.
        epochs: Passes over the images.
        seed: Of initial weights and batches.
    """
    torch.manual_seed(seed)
    net = network(name, int(labels.max()) + 1)
    order = np.random.default_rng(seed).permutation(len(labels))
    train, rest = np.split(order, [len(order) * 9 // 10])
    batches = loader(images[train], labels[train], PRETRAIN_BATCH, seed)
    optimizer = torch.optim.AdamW(net.parameters(), PRETRAIN_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            schedule.step()
    return net, accuracy(net, images[rest], labels[rest])


def finetuned(
    body: nn.Module,
    images: np.ndarray,
    labels: np.ndarray,
    decay: float | None,
    rate: float,
    epochs: int,
    seed: int,
) -> nn.Module:
    """A copy of a pretrained network, with a fresh head and fine-tuned as a whole.

    Args:
        body: The pretrained network; it stays as it is.
        images: To fine-tune on.
        labels: Their classes.
        decay: Of `LayerwiseLRDecay`; None for a fit without it.
        rate: Base learning rate, reached after a tenth of the steps and lowered to 0 in a cosine.
        epochs: Passes over the images.
        seed: Of the head and the batches, the same for every decay.
    """
    torch.manual_seed(seed)
    net: Any = deepcopy(body)
    net.head = nn.Linear(net.head.in_features, int(labels.max()) + 1)
    batches = loader(images, labels, BATCH, seed)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if decay is None else [LayerwiseLRDecay(decay)],
    )
    module = Classifier(net, lambda net: scheduled(net, rate, epochs * len(batches)))
    trainer.fit(module, batches)
    return net


def scheduled(net: nn.Module, rate: float, steps: int) -> dict[str, Any]:
    """AdamW with a short warm-up and a cosine, as Lightning wants it."""
    optimizer = torch.optim.AdamW(net.parameters(), rate, fused=True)
    warmup = max(steps // 10, 1)

    def factor(step: int) -> float:
        rise = min((step + 1) / warmup, 1.0)
        fall = max(step - warmup, 0) / max(steps - warmup, 1)
        return rise * 0.5 * (1 + np.cos(np.pi * fall))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(images: np.ndarray, labels: np.ndarray, size: int, seed: int) -> Any:
    """Shuffled batches, in the same order for the same seed."""
    data = TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(data, size, shuffle=True, generator=generator)


@torch.no_grad()
def accuracy(net: nn.Module, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of the images that a network gets right."""
    net.eval()
    predicted: Tensor = net(torch.from_numpy(images)).argmax(1)
    net.train()
    return float((predicted.numpy() == labels).mean())
