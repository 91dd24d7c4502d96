"""Depths from names alone, counted independently for families of well-known networks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from strategies.learning_rate import layers_from_names, parameter_depths
from tests.strategies.learning_rate import name_lists
from tests.strategies.learning_rate.name_lists import affine


def depths_of(names: Sequence[str]) -> dict[str, int]:
    return parameter_depths(layers_from_names(names))


@pytest.mark.parametrize(
    ("blocks", "convolutions"),
    [((2, 2, 2, 2), 2), ((3, 4, 6, 3), 3), ((3, 4, 23, 3), 3), ((1, 1, 1, 1), 2)],
    ids=["resnet18", "resnet50", "resnet101", "resnet10"],
)
def test_resnet(blocks: tuple[int, ...], convolutions: int) -> None:
    names = name_lists.torchvision_resnet(blocks, convolutions)
    for name, depth in depths_of(names).items():
        if name.startswith("layer"):
            stage, block = int(name[5]), int(name.split(".")[1])
            assert depth == 1 + sum(blocks[: stage - 1]) + block, name
        else:
            assert depth == (sum(blocks) + 1 if name.startswith("fc") else 0), name


@pytest.mark.parametrize("blocks", [(3, 3, 9, 3), (2, 2, 6, 2), (3, 3, 27, 3)])
def test_convnext(blocks: tuple[int, ...]) -> None:
    for name, depth in depths_of(name_lists.torchvision_convnext(blocks)).items():
        part, *rest = name.split(".")
        if part == "classifier":
            assert depth == sum(blocks) + len(blocks), name
        elif int(rest[0]) % 2:  # a stage, after one stem and `stage` layers of down-sampling
            stage = int(rest[0]) // 2
            assert depth == 1 + sum(blocks[:stage]) + stage + int(rest[1]), name
        else:
            stage = int(rest[0]) // 2
            assert depth == sum(blocks[:stage]) + stage, name


@pytest.mark.parametrize("blocks", [(1, 2, 2, 3, 3, 4, 1), (2, 4, 4, 6)])
def test_efficientnet(blocks: tuple[int, ...]) -> None:
    for name, depth in depths_of(name_lists.torchvision_efficientnet(blocks)).items():
        part, stage, block = name.split(".")[:3]
        if part == "classifier" or int(stage) == len(blocks) + 1:
            assert depth == sum(blocks) + 1, name
        elif stage == "0":
            assert depth == 0, name
        else:
            assert depth == 1 + sum(blocks[: int(stage) - 1]) + int(block), name


def test_vgg_and_multilayer_perceptrons_have_one_level_per_layer() -> None:
    vgg = affine(*(f"features.{i}" for i in (0, 2, 5, 7, 10)), *(f"classifier.{i}" for i in (0, 3)))
    mlp = affine("0", "2", "4", "6")
    lenet = affine("conv1", "conv2", "fc1", "fc2", "fc3")
    for names in (vgg, mlp, lenet):
        assert list(depths_of(names).values()) == [i // 2 for i in range(len(names))]


def test_tied_t5_from_names_counts_encoder_then_decoder() -> None:
    depths = depths_of(name_lists.hf_t5(3, tied=True))
    assert depths["shared.weight"] == 0
    assert depths["encoder.block.2.layer.1.DenseReluDense.wo.weight"] == 3
    assert depths["encoder.final_layer_norm.weight"] == 3
    assert depths["decoder.block.0.layer.2.DenseReluDense.wi.weight"] == 4
    assert depths["decoder.block.2.layer.0.SelfAttention.q.weight"] == 6
    assert depths["decoder.final_layer_norm.weight"] == 7


def test_untied_t5_from_names_has_both_embeddings_lowest() -> None:
    depths = depths_of(name_lists.hf_t5(4, tied=False))
    assert depths["encoder.embed_tokens.weight"] == depths["decoder.embed_tokens.weight"] == 0
    assert depths["encoder.block.3.layer.0.layer_norm.weight"] == 4
    assert depths["decoder.block.3.layer.2.layer_norm.weight"] == 8
    assert depths["lm_head.weight"] == 9


def test_gpt2_from_names() -> None:
    for name, depth in depths_of(name_lists.hf_gpt2(6)).items():
        parts = name.split(".")
        expected = int(parts[2]) + 1 if parts[1] == "h" else 7
        assert depth == (0 if parts[1] in ("wte", "wpe") else expected), name


def test_numbers_in_a_dictionary_keep_their_order_of_definition() -> None:
    names = [f"net.{key}.{part}.w" for key in ("10", "2") for part in ("a", "b")]
    assert list(depths_of([*names, "head.w"]).values()) == [0, 0, 1, 1, 2]


def test_slashes_separate_as_dots_do() -> None:
    dotted = name_lists.torchvision_resnet((2, 2), 2)
    slashed = [name.replace(".", "/") for name in dotted]
    assert list(depths_of(slashed).values()) == list(depths_of(dotted).values())


def test_names_in_any_script() -> None:
    names = [f"кодер.{i}.{part}.w" for i in range(2) for part in ("слой", "層")]
    assert depths_of([*names, "выход.w"])["выход.w"] == 2


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # A batch norm without a name of its own, right after a convolution without a bias.
        (["0.weight", *affine("1"), "3.weight", *affine("4", "6")], [0, 0, 0, 1, 1, 1, 2, 2]),
        (["conv1.weight", *affine("bn1"), "conv2.weight", *affine("norm_2", "fc")],
         [0, 0, 0, 1, 1, 1, 2, 2]),
        (affine("a", "ln_1", "b", "input_layernorm", "c"), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]),
    ],
)  # fmt: skip
def test_norm_shares_the_level_of_the_layer_before(names: list[str], expected: list[int]) -> None:
    assert list(depths_of(names).values()) == expected


def test_learned_activation_makes_no_norm_of_the_layer_behind_it() -> None:
    names = [*affine("0"), "1.weight", *affine("2"), "3.weight", *affine("4")]
    depths = depths_of(names)
    assert depths["0.weight"] < depths["2.weight"] < depths["4.weight"]


def test_norm_before_everything_goes_with_the_first_layer() -> None:
    assert list(depths_of(affine("norm", "body", "out")).values()) == [0, 0, 0, 0, 1, 1]


def test_norm_after_the_last_block_goes_with_the_head() -> None:
    depths = depths_of([f"blocks.{i}.{p}.w" for i in range(2) for p in "ab"] + ["norm.w", "head.w"])
    assert depths["norm.w"] == depths["head.w"] == 2


def test_norm_between_two_lists_of_blocks_goes_with_the_block_before() -> None:
    first = [f"encoder.{i}.{p}.w" for i in range(2) for p in "ab"]
    second = [f"decoder.{i}.{p}.w" for i in range(2) for p in "ab"]
    depths = depths_of([*first, "encoder_norm.w", *second])
    assert depths["encoder_norm.w"] == depths["encoder.1.b.w"] == 1
    assert depths["decoder.0.a.w"] == 2
