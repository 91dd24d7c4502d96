"""Models as lists of modules, written by hand, named as well-known libraries name them."""

from __future__ import annotations

import itertools

from strategies.parallel import ModuleInfo, TensorPlan, TensorRule

COLUMN, ROW, VOCAB = TensorRule("column"), TensorRule("row"), TensorRule("vocab")
FUSED = TensorRule("column", sections=3)


def other(path: str, **heads: int) -> ModuleInfo:
    return ModuleInfo(path, "other", **heads)


def linear(path: str, rows: int, columns: int, tied: str | None = None) -> ModuleInfo:
    return ModuleInfo(path, "linear", rows, columns, tied=tied)


def embedding(path: str, rows: int, columns: int) -> ModuleInfo:
    return ModuleInfo(path, "embedding", rows, columns)


def llama(
    blocks: int = 2, width: int = 32, heads: int = 4, kv_heads: int = 4, hidden: int = 48,
    vocabulary: int = 100, tied: bool = False,
) -> list[ModuleInfo]:  # fmt: skip
    few = width * kv_heads // heads
    tree = [other(""), other("model"), embedding("model.embed_tokens", vocabulary, width)]
    tree.append(other("model.layers"))
    for block in (f"model.layers.{i}" for i in range(blocks)):
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        tree += [other(block), other(attention, heads=heads, kv_heads=kv_heads)]
        tree += [linear(f"{attention}.q_proj", width, width)]
        tree += [linear(f"{attention}.{name}", few, width) for name in ("k_proj", "v_proj")]
        tree += [linear(f"{attention}.o_proj", width, width), other(mlp)]
        tree += [linear(f"{mlp}.{name}", hidden, width) for name in ("gate_proj", "up_proj")]
        tree += [linear(f"{mlp}.down_proj", width, hidden), other(f"{block}.input_layernorm")]
    first = "model.embed_tokens" if tied else None
    return [*tree, other("model.norm"), linear("lm_head", vocabulary, width, tied=first)]


def gpt2(blocks: int = 2, width: int = 32, vocabulary: int = 96) -> list[ModuleInfo]:
    """As in nanoGPT, with linear layers and the head tied to the embedding."""
    tree = [other(""), other("transformer"), embedding("transformer.wte", vocabulary, width)]
    tree += [embedding("transformer.wpe", 16, width), other("transformer.h")]
    for block in (f"transformer.h.{i}" for i in range(blocks)):
        tree += [other(block), other(f"{block}.attn", heads=4)]
        tree += [linear(f"{block}.attn.c_attn", 3 * width, width)]
        tree += [linear(f"{block}.attn.c_proj", width, width), other(f"{block}.mlp")]
        tree += [linear(f"{block}.mlp.c_fc", 4 * width, width)]
        tree += [linear(f"{block}.mlp.c_proj", width, 4 * width)]
    return [*tree, linear("lm_head", vocabulary, width, tied="transformer.wte")]


def bert(blocks: int = 1, width: int = 32) -> list[ModuleInfo]:
    tree = [other(""), other("bert"), other("bert.embeddings")]
    tree += [embedding("bert.embeddings.word_embeddings", 60, width)]
    tree += [embedding("bert.embeddings.position_embeddings", 16, width)]
    tree += [other("bert.encoder"), other("bert.encoder.layer")]
    for block in (f"bert.encoder.layer.{i}" for i in range(blocks)):
        attention = f"{block}.attention"
        tree += [other(block), other(attention), other(f"{attention}.self", heads=4)]
        tree += [linear(f"{attention}.self.{n}", width, width) for n in ("query", "key", "value")]
        tree += [other(f"{attention}.output"), linear(f"{attention}.output.dense", width, width)]
        tree += [other(f"{block}.intermediate")]
        tree += [linear(f"{block}.intermediate.dense", 4 * width, width), other(f"{block}.output")]
        tree += [linear(f"{block}.output.dense", width, 4 * width)]
    tree += [other("bert.pooler"), linear("bert.pooler.dense", width, width), other("cls")]
    decoder = linear("cls.decoder", 60, width, tied="bert.embeddings.word_embeddings")
    return [*tree, decoder]


def vit(blocks: int = 2, width: int = 32) -> list[ModuleInfo]:
    """As in timm."""
    tree = [other(""), other("patch_embed"), other("patch_embed.proj")]
    tree.append(ModuleInfo("blocks", "sequential"))
    for block in (f"blocks.{i}" for i in range(blocks)):
        tree += [other(block), other(f"{block}.attn", heads=4)]
        tree += [linear(f"{block}.attn.qkv", 3 * width, width)]
        tree += [linear(f"{block}.attn.proj", width, width), other(f"{block}.mlp")]
        tree += [linear(f"{block}.mlp.fc1", 4 * width, width)]
        tree += [linear(f"{block}.mlp.fc2", width, 4 * width)]
    return [*tree, other("norm"), linear("head", 10, width)]


def sequential(*sizes: int, path: str = "net") -> list[ModuleInfo]:
    tree = [ModuleInfo(path, "sequential")]
    for i, (columns, rows) in enumerate(itertools.pairwise(sizes)):
        name = f"{path}.{2 * i}" if path else str(2 * i)
        tree += [linear(name, rows, columns), other(f"{name}a")]
    return tree


def below(path: str, **rules: TensorRule) -> dict[str, TensorRule]:
    return {f"{path}.{name.replace('__', '.')}": rule for name, rule in rules.items()}


def weights_agree(modules: list[ModuleInfo], plan: TensorPlan) -> bool:
    """Whether modules with one weight split it along one dim, or leave it whole, together."""
    dims = {path: rule.dim for path, rule in plan.rules.items()}
    return all(m.tied is None or dims.get(m.path) == dims.get(m.tied) for m in modules)
