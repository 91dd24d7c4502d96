"""Parameter names as well-known libraries spell them, in the order of their modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def affine(*layers: str) -> list[str]:
    """Weight and bias of each layer."""
    return [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


def timm_vit(depth: int, head: str = "head") -> list[str]:
    names = ["cls_token", "pos_embed", "mask_token", *affine("patch_embed.proj")]
    for i in range(depth):
        inner = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
        names += [f"blocks.{i}.gamma_1", f"blocks.{i}.attn.relative_position_bias_table"]
        names += affine(*(f"blocks.{i}.{layer}" for layer in inner))
    return names + affine("fc_norm", head)


def hf_bert(depth: int) -> list[str]:
    tables = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    names = [f"bert.embeddings.{table}.weight" for table in tables]
    names += affine("bert.embeddings.LayerNorm")
    inner = (
        *(f"attention.self.{part}" for part in ("query", "key", "value")),
        *("attention.output.dense", "attention.output.LayerNorm"),
        *("intermediate.dense", "output.dense", "output.LayerNorm"),
    )
    for i in range(depth):
        names += affine(*(f"bert.encoder.layer.{i}.{layer}" for layer in inner))
    return names + affine("bert.pooler.dense", "classifier")


def torchvision_resnet(blocks: Sequence[int], convolutions: int) -> list[str]:
    """`convolutions` per block: 2 in ResNet-18, 3 in ResNet-50."""
    names = ["conv1.weight", *affine("bn1")]
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            prefix = f"layer{stage}.{block}"
            for i in range(1, convolutions + 1):
                names += [f"{prefix}.conv{i}.weight", *affine(f"{prefix}.bn{i}")]
            if block == 0 and (stage > 1 or convolutions == 3):
                names += [f"{prefix}.downsample.0.weight", *affine(f"{prefix}.downsample.1")]
    return names + affine("fc")


def torchvision_convnext(blocks: Sequence[int]) -> list[str]:
    """Stem and down-sampling at even places of `features`, stages at odd ones."""
    names: list[str] = []
    for stage, count in enumerate(blocks):
        names += affine(f"features.{2 * stage}.0", f"features.{2 * stage}.1")
        for block in range(count):
            prefix = f"features.{2 * stage + 1}.{block}"
            names += [f"{prefix}.layer_scale"]
            names += affine(*(f"{prefix}.block.{i}" for i in (0, 2, 3, 5)))
    return names + affine("classifier.0", "classifier.2")


def timm_swin(blocks: Sequence[int]) -> list[str]:
    """Down-sampling at the start of every stage but the first."""
    names = affine("patch_embed.proj", "patch_embed.norm")
    for stage, count in enumerate(blocks):
        if stage:
            names += [f"layers.{stage}.downsample.reduction.weight"]
            names += affine(f"layers.{stage}.downsample.norm")
        for block in range(count):
            prefix = f"layers.{stage}.blocks.{block}"
            names += [f"{prefix}.attn.relative_position_bias_table"]
            inner = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
            names += affine(*(f"{prefix}.{layer}" for layer in inner))
    return names + affine("norm", "head.fc")


def torchvision_efficientnet(blocks: Sequence[int]) -> list[str]:
    """Stem, stages of inverted residual blocks (the first without expansion), last convolution."""
    names = list(_convolution("features.0"))
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            prefix = f"features.{stage}.{block}.block"
            squeeze = 1 if stage == 1 else 2
            for i in range(squeeze):
                names += _convolution(f"{prefix}.{i}")
            names += affine(f"{prefix}.{squeeze}.fc1", f"{prefix}.{squeeze}.fc2")
            names += _convolution(f"{prefix}.{squeeze + 1}")
    return [*names, *_convolution(f"features.{len(blocks) + 1}"), *affine("classifier.1")]


def _convolution(prefix: str) -> Iterator[str]:
    """A convolution without a bias, then a batch norm."""
    yield f"{prefix}.0.weight"
    yield from affine(f"{prefix}.1")


def hf_t5(depth: int, tied: bool) -> list[str]:
    """Encoder and decoder; with untied embeddings each side lists its own."""
    names = ["shared.weight"] if tied else []
    for side, parts in (
        ("encoder", ("SelfAttention", "DenseReluDense")),
        ("decoder", ("SelfAttention", "EncDecAttention", "DenseReluDense")),
    ):
        names += [] if tied else [f"{side}.embed_tokens.weight"]
        for i in range(depth):
            for j, part in enumerate(parts):
                prefix = f"{side}.block.{i}.layer.{j}"
                inner = ("wi", "wo") if part == "DenseReluDense" else ("q", "k", "v", "o")
                names += [f"{prefix}.{part}.{layer}.weight" for layer in inner]
                if i == 0 and part == "SelfAttention":
                    names += [f"{prefix}.{part}.relative_attention_bias.weight"]
                names += [f"{prefix}.layer_norm.weight"]
        names += [f"{side}.final_layer_norm.weight"]
    return names + ([] if tied else ["lm_head.weight"])


def hf_gpt2(depth: int) -> list[str]:
    names = ["transformer.wte.weight", "transformer.wpe.weight"]
    for i in range(depth):
        inner = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        names += affine(*(f"transformer.h.{i}.{layer}" for layer in inner))
    return [*names, *affine("transformer.ln_f"), "lm_head.weight"]
