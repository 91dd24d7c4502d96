"""Models and steps that are unusual: stages without parameters, random numbers in a step."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.lightning_ext.parallel.models import LENGTH, VOCABULARY, Attention, Module, tokens

HIDDEN = 6


class Flat(Module):
    """Some of its parts have no parameters: the first, the last, two in between."""

    def made(self, kind: str, blocks: int, heads: int) -> nn.Sequential:
        up, down = nn.Linear(LENGTH * VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        return nn.Sequential(nn.Flatten(), up, nn.ReLU(), down, nn.LogSoftmax(-1))

    def step(self, batch: Tensor) -> Tensor:
        x = F.one_hot(batch[:, :-1], VOCABULARY).to(next(self.parameters()).dtype)
        return F.nll_loss(self.model(x), batch[:, -1])


class Turned(nn.Module):
    """Returns what does not lie in one piece in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (4, 4)).mT


class Careless(Module):
    """Takes its batch apart and writes to it, and to what a stage receives; stops by itself."""

    def made(self, kind: str, blocks: int, heads: int) -> nn.Sequential:
        up, down = nn.Linear(LENGTH * VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        return nn.Sequential(
            nn.Flatten(), up, Turned(), nn.ReLU(inplace=True), nn.Flatten(), down, nn.LogSoftmax(-1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch.pop())
        if self.trainer.global_step == 5:
            self.trainer.should_stop = True
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        size = len(batch[0])  # Lightning would look for it in an empty list
        self.log("val_loss", self.step(batch.pop()), sync_dist=True, batch_size=size)

    def step(self, batch: Tensor) -> Tensor:
        batch.add_(1).remainder_(VOCABULARY)
        x = F.one_hot(batch[:, :-1], VOCABULARY).to(next(self.parameters()).dtype)
        return F.nll_loss(self.model(x), batch[:, -1])


class BiasedAttention(Attention):
    """A learned bias of the scores, for each head or for all."""

    def __init__(self, heads: int, each: int) -> None:
        super().__init__(heads)
        self.table = nn.Parameter(torch.linspace(-1, 1, each * LENGTH**2).view(1, each, LENGTH, -1))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=self.table)
        return self.proj(x.transpose(1, 2).flatten(2))


class Biased(Module):
    def made(self, kind: str, blocks: int, heads: int) -> Any:
        model = super().made("vit", blocks, heads)
        for block, each in zip(model.h, (heads, 1), strict=True):
            block.attn = BiasedAttention(heads, each)
        return model


class Beside(nn.Module):
    """Layers that are not split beside two that are, and between them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.rnn, self.norm = nn.GRU(width, width, batch_first=True), nn.BatchNorm1d(LENGTH)
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x, x, x, need_weights=False)[0] + self.rnn(x)[0]
        return x + self.linear2(self.act(self.norm(self.linear1(x))))


class Stack(nn.Module):
    """Its embedding, of a known name, writes to its weight."""

    def __init__(self, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width, max_norm=1.0)
        inside = (Beside(width, heads) for _ in range(blocks))
        self.h = nn.Sequential(*inside, nn.Linear(width, VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.wte(x))


class Mixed(Module):
    def made(self, kind: str, blocks: int, heads: int) -> Stack:
        return Stack(4 * heads, blocks, heads)


class Again(nn.Module):
    """Runs a layer twice, each time with a backward pass of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            own = partial(checkpoint, self.layer, use_reentrant=True)
            x = x + (own if x.requires_grad else self.layer)(x)
        return x


class Twice(Module):
    """A gradient that is not complete when it first arrives, and is sent before the last ones."""

    def made(self, kind: str, blocks: int, heads: int) -> nn.Sequential:
        width = 400  # a weight of more than a megabyte
        inside = (Again(width) for _ in range(blocks))
        return nn.Sequential(nn.Embedding(VOCABULARY, width), *inside, nn.Linear(width, VOCABULARY))


class Mean(torch.autograd.Function):
    """The mean over copies, as synchronized batch norm takes it in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x / dist.get_world_size(group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return Mean.apply(grads[0], ctx.group), None


class Uneven(Module):
    """Copies that wait for each other in the backward pass, every other one without a layer."""

    def made(self, kind: str, blocks: int, heads: int) -> nn.ModuleList:
        return nn.ModuleList([nn.Linear(VOCABULARY, 600), *(nn.Linear(600, 600) for _ in "ab")])

    def step(self, batch: Tensor) -> Tensor:
        first, second, third = self.model
        mesh = getattr(self.trainer.strategy, "mesh", None)
        x = first(F.one_hot(batch, VOCABULARY).to(first.weight.dtype).sum(1))
        mean = x.mean(0)
        x = x - (mean if mesh is None else Mean.apply(mean, mesh.data))
        rows = {i: x[i::4] for i in range(4)} if mesh is None else {mesh.data_rank: x}
        outputs = [second(part) for part in rows.values()]
        outputs = [y + third(y) if i % 2 else y for i, y in zip(rows, outputs, strict=True)]
        return torch.cat(outputs).square().mean() / 100

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        loss.backward(*args, **kwargs)


class Even(Uneven):
    """With Lightning's own `backward`, so that gradients are sent while they are found."""

    backward = LightningModule.backward


class Thawed(Module):
    """Trains its first layers, all of the first stage, from the second epoch on."""

    def made(self, kind: str, blocks: int, heads: int) -> Any:
        model = super().made("gpt2", blocks, heads)
        self.train_first(model, False)
        return model

    def train_first(self, model: Any, wanted: bool) -> None:
        for layer in (model.wte, model.wpe, model.h[0]):
            layer.requires_grad_(wanted)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.train_first(self.model, True)


class Extreme(Module):
    """Logs other reductions than the mean, before the model is called too; has no `batch_idx`."""

    def made(self, kind: str, blocks: int, heads: int) -> Any:
        return super().made("gpt2", blocks, heads)

    def training_step(self, batch: list[Tensor]) -> Tensor:  # type: ignore[override]
        targets = batch[0][:, 1:]
        logits = self.model(batch[0][:, :-1])
        for name, how in (("min", torch.amin), ("max", torch.amax), ("sum", torch.sum)):
            value = how(logits.detach())
            self.log(name, value, reduce_fx=name, sync_dist=True, on_step=True, on_epoch=True)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def on_validation_epoch_end(self) -> None:
        """Uses the model outside of a step."""
        self.log("sampled", self.model(tokens(2)[:, :-1]).square().mean(), sync_dist=True)

    def validation_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        self.log("items", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
        loss = self.step(batch[0])
        self.log("val_loss", loss, sync_dist=True)


class Carry(nn.Module):
    """Takes and returns a pair, as one argument, as `nn.Sequential` hands it on."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, given = pair
        return torch.tanh(self.layer(x)), given


class Begin(nn.Module):
    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        return given, given


class Noisy(Module):
    """Draws what the model gets and what it has to predict, and finds both at its end again."""

    def __init__(self, kind: str = "noisy", *sizes: int) -> None:
        super().__init__(kind, *sizes)
        self.drawn: list[tuple[int, Tensor, float, float]] = []
        self.used: list[tuple[int, Tensor, Tensor]] = []

    def made(self, kind: str, blocks: int, heads: int) -> nn.Sequential:
        middle = (Carry(HIDDEN, HIDDEN) for _ in range(blocks))
        return nn.Sequential(Begin(), Carry(LENGTH + 1, HIDDEN), *middle, Carry(HIDDEN, 1))

    def step(self, batch: Tensor) -> Tensor:
        """Each library draws; a target of other draws than the input would not fit it."""
        x = batch.to(next(self.parameters()).dtype) / VOCABULARY
        noise, scale = torch.rand_like(x), float(np.random.rand())
        sign = 1.0 if random.random() < 0.5 else -1.0
        given = (x + scale * noise) * sign
        target = sign * noise.mean(-1, keepdim=True) * scale
        if self.trainer.training:
            self.drawn.append((self.trainer.global_step, noise, scale, sign))
        found, passed = self.model(given)
        assert torch.equal(passed, given)
        if self.trainer.training:
            self.used.append((self.trainer.global_step, given, target))
        return F.mse_loss(found, target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
