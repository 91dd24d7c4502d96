"""Small transformers as people write them, in the names of well-known models."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_ext.parallel import PipelinePart
from lightning_ext.strategies import ThreeDParallelStrategy

VOCABULARY, LENGTH, HEADS, HEAD = 32, 8, 4, 4
WIDTH = HEADS * HEAD


class CausalSelfAttention(nn.Module):
    """As in nanoGPT: queries, keys and values in one layer, a mask as buffer."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        width = heads * HEAD
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width
        mask = torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH)
        self.register_buffer("bias", mask)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(weights, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Attention(nn.Module):
    """As in timm: queries, keys and values in one layer, five dims."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads, self.head_dim, width = heads, HEAD, heads * HEAD
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class LlamaAttention(nn.Module):
    """As in transformers: separate projections, fewer heads of keys and values."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, heads // 2, HEAD
        width = heads * HEAD
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width // 2, bias=False)
        self.v_proj = nn.Linear(width, width // 2, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (
            p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (y.repeat_interleave(2, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class Gated(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, kind: str, heads: int = HEADS) -> None:
        super().__init__()
        width = heads * HEAD
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        kinds = {"gpt2": CausalSelfAttention, "vit": Attention, "llama": LlamaAttention}
        self.attn = kinds[kind](heads)
        self.mlp: nn.Module
        if kind == "llama":
            self.mlp = Gated(width)
        else:
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Tied embedding and head."""

    def __init__(self, kind: str, blocks: int = 8, heads: int = HEADS) -> None:
        super().__init__()
        width = heads * HEAD
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.h = nn.ModuleList([Block(kind, heads) for _ in range(blocks)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def pipeline_parts(self) -> list[Any]:
        embed = PipelinePart(self.embed, modules=(self.wte, self.wpe))
        return [embed, *self.h, self.ln_f, self.lm_head]


def tokens(items: int) -> Tensor:
    """Random tokens, one more than the length of the model's input in each row."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (items, LENGTH + 1), generator=generator)


def norm_of(module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> float:
    """The norm of all gradients: torch's own on one process, that of the strategy on ranks."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strategy = module.trainer.strategy
    if isinstance(strategy, ThreeDParallelStrategy):
        assert strategy._engine is not None
        return float(strategy._engine.gradients.norm(parameters))
    return float(get_total_norm([p.grad for p in parameters if p.grad is not None]))


class Recorded(pl.LightningModule):
    """Data in order, and a record of losses, of norms before and after clipping, and of types."""

    def begin(self, items: int, batch: int) -> None:
        """Set the sizes of the data and of a batch."""
        self.items, self.batch = items, batch
        self.seen: list[float] = []
        self.norms: list[float] = []
        self.dtypes: set[str] = set()
        self.sane = 0

    def on_fit_start(self) -> None:
        for module in self.modules():
            if type(module) is nn.Linear:
                module.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Which type a layer computes in while the model is trained."""
        if self.trainer.training:
            self.dtypes.add(str(output.dtype))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.seen.append(float(self.trainer.strategy.reduce(loss.detach())))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(norm_of(self, optimizer))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, *args, **kwargs)
        self.norms.append(norm_of(self, optimizer))

    def on_validation_batch_end(self, *args: Any) -> None:
        self.sane += self.trainer.sanity_checking

    def data(self) -> TensorDataset:
        return TensorDataset(tokens(self.items))

    def train_dataloader(self) -> DataLoader[Any]:
        data, strategy = self.data(), self.trainer.strategy
        if not isinstance(strategy, ThreeDParallelStrategy):
            return DataLoader(data, batch_size=self.batch)
        # In order, which the sampler that Lightning puts in would not be.
        sampler = DistributedSampler(data, shuffle=False, **strategy.distributed_sampler_kwargs)
        return DataLoader(data, batch_size=self.batch // strategy.layout.data, sampler=sampler)


class Module(Recorded):
    """Predicts the next token."""

    def __init__(
        self,
        kind: str = "gpt2",
        blocks: int = 8,
        items: int = 32,
        batch: int = 8,
        heads: int = HEADS,
    ) -> None:
        super().__init__()
        self.begin(items, batch)
        torch.manual_seed(0)
        self.model = self.made(kind, blocks, heads)

    def made(self, kind: str, blocks: int, heads: int) -> Any:
        """The model inside."""
        return Transformer(kind, blocks, heads)

    def step(self, batch: Tensor) -> Tensor:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        logits = self.model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch[0])
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch[0])
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.step(batch[0]), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0][:, :-1]).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


class MaskedBlock(nn.Module):
    """Takes and returns two tensors, and a mask besides."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, total: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        seen = (self.mix(x) * mask.unsqueeze(-1)).cumsum(1)
        x = self.norm(x + torch.tanh(seen))
        return x, total + x.mean(-1)


class Masked(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([MaskedBlock() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def begin(self, tokens: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens) * scale
        return x, torch.zeros_like(x[..., 0])

    def end(self, x: Tensor, total: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x), "total": total}

    def forward(self, tokens: Tensor, scale: Tensor, mask: Tensor) -> dict[str, Tensor]:
        state = self.begin(tokens, scale)
        for block in self.blocks:
            state = block(*state, mask=mask)
        return self.end(*state)

    def pipeline_parts(self) -> list[PipelinePart]:
        return [
            PipelinePart(self.begin, modules=(self.embedding,), takes=("tokens", "scale")),
            *(PipelinePart(block, takes=("mask",)) for block in self.blocks),
            PipelinePart(self.end, modules=(self.head,)),
        ]


class Elaborate(Module):
    """Parameters and work before and after the call of the model, a mask, several outputs."""

    def __init__(self, kind: str = "masked", *sizes: int) -> None:
        super().__init__(kind, *sizes)
        self.scale = nn.Parameter(torch.ones(()))
        self.after = nn.Linear(VOCABULARY, VOCABULARY)
        self.unused = nn.Parameter(torch.ones(3))

    def made(self, kind: str, blocks: int, heads: int) -> Any:
        return Masked(blocks)

    def step(self, batch: Tensor) -> Tensor:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        found = self.model(tokens, mask=(tokens > 3).to(self.scale.dtype), scale=self.scale * 2)
        logits = self.after(found["logits"])
        self.log("count", float(len(tokens)), reduce_fx="sum", on_step=True, on_epoch=False)
        self.log("largest", logits.detach().max(), reduce_fx="max", sync_dist=False, on_step=True)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + self.scale * found["total"].square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        loss = self.step(batch[0])
        return {"loss": loss, "tokens": batch[0], "twice": 2 * loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert torch.equal(outputs["tokens"], batch[0])
        assert torch.allclose(outputs["twice"], 2 * outputs["loss"])
