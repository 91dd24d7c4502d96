"""Depths against the formulas that the papers' own code applies to parameter names."""

from __future__ import annotations

import pytest

from strategies.learning_rate import (
    layers_from_names,
    layerwise_multipliers,
    parameter_depths,
)
from tests.strategies.learning_rate.name_lists import affine, hf_bert, timm_swin, timm_vit


def beit(name: str, num_max_layer: int) -> int:
    """BEiT, `get_num_layer_for_vit`."""
    if name in ("cls_token", "mask_token", "pos_embed"):
        return 0
    if name.startswith("patch_embed"):
        return 0
    if name.startswith("rel_pos_bias"):
        return num_max_layer - 1
    if name.startswith("blocks"):
        return int(name.split(".")[1]) + 1
    return num_max_layer - 1


def mae(name: str, num_layers: int) -> int:
    """MAE, `get_layer_id_for_vit`."""
    if name in ("cls_token", "pos_embed", "mask_token"):
        return 0
    if name.startswith("patch_embed"):
        return 0
    if name.startswith("blocks"):
        return int(name.split(".")[1]) + 1
    return num_layers


@pytest.mark.parametrize("depth", [2, 3, 12, 40])
def test_vit_is_numbered_as_by_beit(depth: int) -> None:
    names = timm_vit(depth)
    names.insert(5, "rel_pos_bias.relative_position_bias_table")
    depths = parameter_depths(layers_from_names(names))
    assert depths == {name: beit(name, num_max_layer=depth + 2) for name in names}


@pytest.mark.parametrize("depth", [1, 2, 12, 24])
@pytest.mark.parametrize("decay", [0.65, 0.75, 1.0])
def test_vit_rates_are_those_of_mae(depth: int, decay: float) -> None:
    names = timm_vit(depth)
    num_layers = depth + 1
    scales = [decay ** (num_layers - i) for i in range(num_layers + 1)]
    expected = {name: scales[mae(name, num_layers)] for name in names}
    assert layerwise_multipliers(names, decay) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("depth", [2, 12])
def test_two_heads_of_a_distilled_vit_are_both_at_the_top(depth: int) -> None:
    names = timm_vit(depth) + affine("head_dist")
    depths = parameter_depths(layers_from_names(names))
    assert {depths[name] for name in names[-4:]} == {depth + 1}


@pytest.mark.parametrize("depth", [2, 12, 24])
def test_bert_is_numbered_as_by_electra_up_to_the_head(depth: int) -> None:
    names = hf_bert(depth)
    depths = parameter_depths(layers_from_names(names))
    for name in names:
        if ".embeddings." in name:
            assert depths[name] == 0, name
        elif ".layer." in name:
            assert depths[name] == int(name.split(".layer.")[1].split(".")[0]) + 1, name
        else:
            # ELECTRA leaves a level free here, `n_layers + 2`; BEiT and MAE, as we, do not.
            assert depths[name] == depth + 1, name


@pytest.mark.parametrize("blocks", [(2, 2, 6, 2), (1, 1, 1), (2, 2, 18, 2)])
def test_swin_blocks_come_in_the_order_of_simmim(blocks: tuple[int, ...]) -> None:
    """SimMIM numbers blocks through all stages; we add a level for each down-sampling between."""
    names = timm_swin(blocks)
    depths = parameter_depths(layers_from_names(names))
    for name in names:
        part = name.split(".")
        if part[0] == "patch_embed":
            assert depths[name] == 0, name
        elif part[0] == "layers" and part[2] == "blocks":
            stage, block = int(part[1]), int(part[3])
            in_simmim = sum(blocks[:stage]) + block + 1
            assert depths[name] == in_simmim + stage, name
        elif part[0] == "layers":
            assert depths[name] == sum(blocks[: int(part[1])]) + int(part[1]), name
        else:
            assert depths[name] == sum(blocks) + len(blocks), name
