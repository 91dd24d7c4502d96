"""What one writes today for pipeline x data x tensor ranks: torch alone, one model, no Trainer.

The measure for `ThreeDParallelStrategy`: torch's own schedule, its `parallelize_module` and
`DistributedDataParallel`, in the order in which torch's tutorials put them together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

LAYER = {
    "attn.q_proj": ColwiseParallel,
    "attn.k_proj": ColwiseParallel,
    "attn.v_proj": ColwiseParallel,
    "attn.o_proj": RowwiseParallel,
    "mlp.fc1": ColwiseParallel,
    "mlp.fc2": RowwiseParallel,
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (
            p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width, heads), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def model(width: int, blocks: int, heads: int, vocabulary: int) -> nn.Sequential:
    """A transformer that predicts the next token, the same on every rank."""
    torch.manual_seed(0)
    network = nn.Sequential()
    network.add_module("wte", nn.Embedding(vocabulary, width))
    for i in range(blocks):
        network.add_module(f"h{i}", Block(width, heads))
    network.add_module("norm", nn.LayerNorm(width))
    network.add_module("lm_head", nn.Linear(width, vocabulary, bias=False))
    return network


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ByHand:
    """A training step on the ranks of a layout.

    Args:
        network: The whole model.
        layout: Pipeline, data and tensor ranks.
        counts: Layers of each stage.
        microbatches: Of each step.
    """

    def __init__(
        self,
        network: nn.Sequential,
        layout: tuple[int, int, int],
        counts: list[int],
        microbatches: int,
    ) -> None:
        pp, dp, tp = layout
        self.mesh = init_device_mesh("cpu", layout, mesh_dim_names=("pp", "dp", "tp"))
        stage = self.mesh["pp"].get_local_rank()
        start = sum(counts[:stage])
        self.module: nn.Module = network[start : start + counts[stage]]
        if tp > 1:
            self._split(self.mesh["tp"])
        trained = self.module
        self.reduce = dp > 1 and tp > 1
        if dp > 1 and not self.reduce:
            trained = DistributedDataParallel(
                self.module, process_group=self.mesh["dp"].get_group()
            )
        self.pp, self.first, self.last, self.trained = pp, stage == 0, stage == pp - 1, trained
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        if pp > 1:
            group = self.mesh["pp"].get_group()
            cut = PipelineStage(trained, stage, pp, torch.device("cpu"), group=group)
            self.schedule = Schedule1F1B(cut, microbatches, loss_fn=loss_of)

    def _split(self, mesh: DeviceMesh) -> None:
        for name, layer in self.module.named_children():
            if name.startswith("h"):
                parallelize_module(layer, mesh, {k: kind() for k, kind in LAYER.items()})
        ends: dict[str, Any] = {
            "wte": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        here = {k: v for k, v in ends.items() if k in dict(self.module.named_children())}
        if here:
            parallelize_module(self.module, mesh, here)

    def step(self, tokens: Tensor, targets: Tensor) -> float | None:
        """One step; the loss on the last stage."""
        self.optimizer.zero_grad()
        loss: float | None = None
        if self.pp == 1:
            value = loss_of(self.trained(tokens), targets)
            value.backward()
            loss = value.item()
        else:
            losses: list[Tensor] = []
            given: dict[str, Any] = {"target": targets, "losses": losses} if self.last else {}
            self.schedule.step(*((tokens,) if self.first else ()), **given)
            loss = torch.stack(losses).mean().item() if self.last else None
        if self.reduce:
            self._all_reduce()
        self.optimizer.step()
        return loss

    def _all_reduce(self) -> None:
        """DistributedDataParallel does not take a model of whole and split tensors."""
        group = self.mesh["dp"].get_group()
        found = [p.grad for p in self.module.parameters() if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in found]
        flat = torch.cat([g.reshape(-1) for g in local])
        dist.all_reduce(flat, group=group)
        flat /= self.mesh["dp"].size()
        for g, piece in zip(local, torch.split(flat, [g.numel() for g in local]), strict=True):
            g.copy_(piece.view_as(g))
