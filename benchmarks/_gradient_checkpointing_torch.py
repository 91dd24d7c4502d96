"""Ways to hold fewer activations in torch, on one transformer."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

from benchmarks._memory import Peak
from lightning_ext.recompute.runner import Runner
from lightning_ext.recompute.units import units_of

VOCABULARY = 256


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        items, length, width = x.shape
        split = self.qkv(x).view(items, length, 3, self.heads, width // self.heads)
        y = self.attend(*split.permute(2, 0, 3, 1, 4))
        out: Tensor = self.proj(y.transpose(1, 2).reshape(items, length, width))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.dropout = Attention(width, heads), nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """`through` runs the blocks."""

    def __init__(self, blocks: int, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, 4, dropout) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.through: Callable[[nn.Sequential, Tensor], Tensor] = lambda blocks, x: blocks(x)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.through(self.blocks, self.embed(tokens))))
        return out


@dataclass
class Method:
    """A way to run a step.

    Args:
        name: For the table.
        model: Of its own.
        around: Context of the forward pass. Default: none.
        predicted: Bytes of activations that are planned. Default: 0, nothing is.
    """

    name: str
    model: nn.Module
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    predicted: int = 0

    def step(self, tokens: Tensor) -> Tensor:
        """A step without an optimizer; the loss."""
        torch.manual_seed(1)
        self.model.zero_grad()
        with self.around():
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        return loss.detach()


def some(count: int) -> Callable[[nn.Sequential, Tensor], Tensor]:
    """`torch.utils.checkpoint` on so many blocks, evenly."""

    def through(blocks: nn.Sequential, x: Tensor) -> Tensor:
        for i, block in enumerate(blocks):
            again = (i + 1) * count // len(blocks) > i * count // len(blocks)
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x

    return through


def segments(count: int) -> Callable[[nn.Sequential, Tensor], Tensor]:
    """`torch.utils.checkpoint.checkpoint_sequential`."""
    return lambda blocks, x: checkpoint_sequential(blocks, count, x, use_reentrant=False)


def planned(plain: Transformer, tokens: Tensor, shares: tuple[float, ...]) -> Iterator[Method]:
    """Ours, at some shares of the plain activations."""
    for share in shares:
        model = copy.deepcopy(plain)
        runner = Runner(units_of(model))
        runner.measure([*model.parameters(), tokens])
        Method("", model, runner.step).step(tokens)
        table = runner.measured()
        assert table is not None
        plan = table.plan(share * table.plain_peak)
        runner.apply(table.applied(plan))
        yield Method(f"planned, budget {share:.0%}", model, runner.step, plan.peak)


@contextmanager
def _partitioned(budget: float) -> Iterator[None]:
    from torch._functorch import config

    with config.patch(activation_memory_budget=budget):
        yield


def methods(blocks: int, width: int, tokens: Tensor, quick: bool) -> list[Method]:
    """All, the plain one first."""
    plain = Transformer(blocks, width)

    def with_blocks(name: str, through: Callable[[nn.Sequential, Tensor], Tensor]) -> Method:
        model = copy.deepcopy(plain)
        model.through = through
        return Method(name, model)

    found = [Method("plain", plain)]
    shares = (0.5,) if quick else (0.8, 0.6, 0.5, 0.4, 0.2)
    found += planned(plain, tokens, shares)
    counts = (blocks // 2,) if quick else (blocks // 4, blocks // 2, blocks * 3 // 4, blocks)
    found += [with_blocks(f"checkpoint on {n} of {blocks} blocks", some(n)) for n in counts]
    for n in (2,) if quick else (2, 4, 6, 12):
        found.append(with_blocks(f"checkpoint_sequential, {n} segments", segments(n)))
    return found


def measure(method: Method, tokens: Tensor, expected: Tensor | None) -> dict[str, Any]:
    """Memory and operations of a step."""
    with Peak() as peak:
        loss = method.step(tokens)
    # Its module tracker looks at gradients of whatever it meets.
    with FlopCounterMode(display=False) as counter:
        method.step(tokens)
    gradients = torch.cat(
        [p.grad.flatten() for p in method.model.parameters() if p.grad is not None]
    )
    return {
        "name": method.name, "peak": peak.highest, "flops": counter.get_total_flops(),
        "predicted": method.predicted, "loss": float(loss),
        "same": expected is None or torch.equal(gradients, expected), "gradients": gradients,
    }  # fmt: skip


def timed(all_methods: list[Method], tokens: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of steps, in turns."""
    times: dict[str, list[float]] = {method.name: [] for method in all_methods}
    for i in range(rounds + 2):
        for method in all_methods[:: -1 if i % 2 else 1]:
            began = time.perf_counter()
            method.step(tokens)
            if i > 1:
                times[method.name].append(time.perf_counter() - began)
    return times


def compiled(width: int, blocks: int, tokens: Tensor, budgets: tuple[float, ...]) -> list[Any]:
    """Bytes that torch's own partitioner saves, and seconds, against the plain compiled model."""
    rows = []
    for budget in (1.0, *budgets):
        torch.compiler.reset()
        model = Transformer(blocks, width, dropout=0.0)
        with _partitioned(budget):
            method = Method("", torch.compile(model, backend="aot_eager_decomp_partition"))
            method.step(tokens)
        saved: dict[int, int] = {}

        def pack(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            if not isinstance(t, nn.Parameter):
                saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            method.step(tokens)
        seconds = []
        for _ in range(8):
            began = time.perf_counter()
            method.step(tokens)
            seconds.append(time.perf_counter() - began)
        rows.append(
            {"budget": budget, "saved": sum(saved.values()), "seconds": statistics.median(seconds)}
        )
    torch.compiler.reset()
    return rows
