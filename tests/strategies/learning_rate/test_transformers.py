"""Depths of real `transformers` models with random weights, against the index in the name.

Names differ between versions of `transformers` (`encoder.layer.0`, `layers.0`); the index does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.strategies.learning_rate.nets import depths_by_name, depths_of

transformers = pytest.importorskip("transformers")

N = 3
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": N,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
DECODER = {**SMALL, "vocab_size": 20, "num_key_value_heads": 2, "tie_word_embeddings": False}
STAGES = (2, 1, 2)
_BLOCK = re.compile(r"\.(?:layers?|h|block|blocks)\.(\d+)\.")


def build(model: str, config: str, **settings: Any) -> Any:
    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def first_index(name: str) -> int | None:
    return int(found[1]) if (found := _BLOCK.search(name)) else None


def assert_depths(module: Any, expected: Callable[[str], int]) -> None:
    depths = depths_of(module)
    assert depths == {name: expected(name) for name in depths}


@pytest.mark.parametrize(
    ("model", "config", "settings"),
    [
        ("BertForSequenceClassification", "BertConfig", {**SMALL, "vocab_size": 20}),
        ("ViTForImageClassification", "ViTConfig", {**SMALL, "image_size": 32}),
        ("LlamaForCausalLM", "LlamaConfig", DECODER),
        ("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 2}),
        ("GPT2LMHeadModel", "GPT2Config",
         {"n_embd": 16, "n_layer": N, "n_head": 2, "vocab_size": 20, "tie_word_embeddings": False}),
        ("Wav2Vec2ForCTC", "Wav2Vec2Config",
         {**SMALL, "vocab_size": 20, "conv_dim": (8, 8), "conv_stride": (2, 2),
          "conv_kernel": (3, 3), "num_conv_pos_embedding_groups": 2}),
    ],
    ids=["bert", "vit", "llama", "mixtral", "gpt2", "wav2vec2"],
)  # fmt: skip
def test_encoder_or_decoder(model: str, config: str, settings: dict[str, Any]) -> None:
    module = build(model, config, **settings)
    at_the_top = re.compile(
        r"^(bert\.pooler|classifier|vit\.layernorm|model\.norm|lm_head|transformer\.ln_f)"
    )

    def expected(name: str) -> int:
        if at_the_top.match(name):
            return N + 1
        index = first_index(name)
        return 0 if "conv_layers" in name or index is None else index + 1

    assert_depths(module, expected)
    assert depths_by_name(module) == depths_of(module)


def test_tied_head_is_used_deepest() -> None:
    module = build("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=N, n_head=2, vocab_size=20)
    depths = depths_of(module)
    assert depths["transformer.wte.weight"] == depths["lm_head.weight"] == N + 1
    assert depths["transformer.wpe.weight"] == 0
    assert depths["transformer.h.0.ln_1.weight"] == 1


@pytest.mark.parametrize("tied", [True, False])
def test_t5(tied: bool) -> None:
    settings = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "vocab_size": 20}
    module = build(
        "T5ForConditionalGeneration", "T5Config",
        **settings, num_layers=N, tie_word_embeddings=tied,
    )  # fmt: skip
    head_is_embedding = module.lm_head.weight is module.shared.weight

    def expected(name: str) -> int:
        if name.startswith("lm_head") or name == "decoder.final_layer_norm.weight":
            return 2 * N + 1
        if "shared" in name or "embed_tokens" in name:
            return 2 * N + 1 if head_is_embedding else 0
        index = first_index(name)
        in_encoder = name.startswith("encoder")
        if index is None:  # the encoder's final norm shares the level before it
            return N
        return index + 1 if in_encoder else N + index + 1

    assert_depths(module, expected)


def test_swin_counts_through_its_stages() -> None:
    module = build(
        "SwinForImageClassification", "SwinConfig",
        image_size=32, patch_size=2, embed_dim=8, depths=STAGES, num_heads=(2, 2, 2), window_size=2,
    )  # fmt: skip

    def expected(name: str) -> int:
        if "embeddings" in name:
            return 0
        if not (found := re.search(r"layers\.(\d+)\.(blocks\.(\d+)|downsample)", name)):
            return sum(STAGES) + len(STAGES)  # one level for each down-sampling in between
        stage = int(found[1])
        block = STAGES[stage] if found[3] is None else int(found[3])
        return 1 + sum(STAGES[:stage]) + stage + block

    assert_depths(module, expected)
    assert depths_by_name(module) == depths_of(module)


def test_resnet_counts_through_its_stages() -> None:
    module = build(
        "ResNetForImageClassification", "ResNetConfig",
        embedding_size=8, hidden_sizes=(8, 8, 16), depths=STAGES,
    )  # fmt: skip

    def expected(name: str) -> int:
        if "embedder" in name:
            return 0
        if not (found := re.search(r"stages\.(\d+)\.layers\.(\d+)", name)):
            return sum(STAGES) + 1
        return 1 + sum(STAGES[: int(found[1])]) + int(found[2])

    assert_depths(module, expected)


def test_convnext_counts_through_its_stages() -> None:
    module = build(
        "ConvNextForImageClassification", "ConvNextConfig",
        hidden_sizes=(8, 8, 16), depths=STAGES, num_stages=3,
    )  # fmt: skip

    def expected(name: str) -> int:
        if "embeddings" in name:
            return 0
        if not (found := re.search(r"stages\.(\d+)\.(?:layers\.(\d+)|downsampling)", name)):
            return sum(STAGES) + len(STAGES)
        stage = int(found[1])
        before = sum(STAGES[:stage]) + stage
        return before if found[2] is None else 1 + before + int(found[2])

    assert_depths(module, expected)
    assert depths_by_name(module) == depths_of(module)


def test_bart_has_all_embeddings_lowest() -> None:
    sizes = {"layers": N, "attention_heads": 2, "ffn_dim": 16}
    sides = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sizes.items()}
    module = build("BartModel", "BartConfig", d_model=16, vocab_size=20, **sides)

    def expected(name: str) -> int:
        index = first_index(name)
        if index is None:
            return 0
        return index + 1 + (N if name.startswith("decoder") else 0)

    assert_depths(module, expected)
