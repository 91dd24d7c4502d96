"""Transformers that know nothing of stages, or tell them by the protocol alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos import Transformer as DemoTransformer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_ext.parallel import PipelinePart
from tests.lightning_ext.parallel.models import (
    HEAD,
    HEADS,
    LENGTH,
    VOCABULARY,
    Block,
    Module,
    Recorded,
    tokens,
)


class Embeddings(nn.Module):
    """Words and positions. Its argument is not called as that of `nn.Sequential` is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, width)
        self.position_embeddings = nn.Embedding(LENGTH, width)
        self.LayerNorm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.size(1), device=words.device)
        return self.LayerNorm(self.word_embeddings(words) + self.position_embeddings(places))


class Sequential(Module):
    """`nn.Sequential(embedding, *blocks, norm, head)`."""

    def made(self, kind: str, blocks: int, heads: int) -> nn.Sequential:
        width = heads * HEAD
        inside = (Block("gpt2", heads) for _ in range(blocks))
        head = nn.Linear(width, VOCABULARY)
        return nn.Sequential(Embeddings(width), *inside, nn.LayerNorm(width), head)


class BertSelfAttention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        width = heads * HEAD
        self.num_attention_heads, self.attention_head_size = heads, HEAD
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        shape = (*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        return x.view(shape).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (self.transpose_for_scores(f(x)) for f in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.attention_head_size)
        probabilities = nn.functional.softmax(scores + attention_mask, dim=-1)
        context = torch.matmul(probabilities, v).permute(0, 2, 1, 3).contiguous()
        return context.view((*context.size()[:-2], -1))


class BertOutput(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inner, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + before)


class BertAttention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.self = BertSelfAttention(heads)
        self.output = BertOutput(heads * HEAD, heads * HEAD)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.output(self.self(x, attention_mask), x)


class BertIntermediate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class BertLayer(nn.Module):
    """In the names of transformers' BERT."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        width = heads * HEAD
        self.attention = BertAttention(heads)
        self.intermediate = BertIntermediate(width)
        self.output = BertOutput(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attended = self.attention(x, mask)
        return self.output(self.intermediate(attended), attended)


class BertStack(nn.Module):
    def __init__(self, blocks: int, heads: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(heads * HEAD)
        self.layer = nn.ModuleList(BertLayer(heads) for _ in range(blocks))
        self.decoder = nn.Linear(heads * HEAD, VOCABULARY)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.embeddings(words)
        for layer in self.layer:
            x = layer(x, mask)
        return self.decoder(x)

    def pipeline_parts(self) -> list[Any]:
        first = PipelinePart(self.embeddings, takes=("words",))
        layers = (PipelinePart(layer, takes=("mask",)) for layer in self.layer)
        return [first, *layers, self.decoder]


class Bert(Module):
    """Every layer adds a mask to its scores."""

    def made(self, kind: str, blocks: int, heads: int) -> BertStack:
        return BertStack(blocks, heads)

    def step(self, batch: Tensor) -> Tensor:
        words, targets = batch[:, :-1], batch[:, 1:]
        dtype = next(self.parameters()).dtype
        mask = (words < 4)[:, None, None, :].to(dtype) * torch.finfo(torch.bfloat16).min
        logits = self.model(words, mask=mask)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PartedTransformer(DemoTransformer):
    """Lightning's own, with its `forward` as it is."""

    def embed(self, inputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        scale = math.sqrt(self.ninp)
        source = self.pos_encoder(self.embedding(inputs) * scale)
        return source, self.pos_encoder(self.embedding(target) * scale)

    def encode(self, layer: nn.Module, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return layer(source), target

    def decode(self, layer: nn.Module, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.generate_square_subsequent_mask(target.size(1)).to(target.device)
        return source, layer(target, source, tgt_mask=mask)

    def end(self, source: Tensor, target: Tensor) -> Tensor:
        output = self.decoder(self.transformer.decoder.norm(target))
        return F.log_softmax(output, dim=-1).view(-1, self.vocab_size)

    def pipeline_parts(self) -> list[PipelinePart]:
        encoder, decoder = self.transformer.encoder, self.transformer.decoder
        encoding, decoding = [*encoder.layers, encoder.norm], [*decoder.layers]
        return [
            PipelinePart(self.embed, modules=(self.embedding,), takes=("inputs", "target")),
            *(PipelinePart(partial(self.encode, m), modules=(m,)) for m in encoding),
            *(PipelinePart(partial(self.decode, m), modules=(m,)) for m in decoding),
            PipelinePart(self.end, modules=(decoder.norm, self.decoder)),
        ]


class Demo(LightningTransformer, Recorded):
    """Lightning's own module, with its `training_step` and optimizer, on data of ours.

    Without dropout, which draws other units in each stage than one process would.
    """

    def __init__(
        self, kind: str, blocks: int, items: int = 32, batch: int = 8, heads: int = HEADS
    ) -> None:
        super().__init__(vocab_size=VOCABULARY)
        self.begin(items, batch)
        torch.manual_seed(0)
        width = heads * HEAD
        self.model = PartedTransformer(VOCABULARY, width, heads, 2 * width, blocks, dropout=0.0)

    def prepare_data(self) -> None:
        """Nothing to download."""

    def data(self) -> TensorDataset:
        rows = tokens(self.items)
        return TensorDataset(rows[:, :-1], rows[:, 1:])

    def train_dataloader(self) -> Any:
        return Recorded.train_dataloader(self)
