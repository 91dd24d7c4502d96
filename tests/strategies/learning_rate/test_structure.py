"""The tree of layers, by hand and from names."""

from __future__ import annotations

from typing import Any

import pytest

from strategies.learning_rate import Layer, Parameter, layers_from_names
from strategies.learning_rate.structure import (
    is_norm_kind,
    looks_like_embedding,
    looks_like_head,
    looks_like_norm,
)
from tests.strategies.learning_rate.name_lists import affine, torchvision_resnet


def child(root: Layer, path: str) -> Layer:
    return next(layer for layer in root.walk() if layer.name == path)


def test_tree_holds_every_name_once_and_in_order() -> None:
    names = ["b.x.w", "a", "b.y.w", "c/d/e", "b.x.v"]
    root = layers_from_names(names)
    assert [layer.name for layer in root.walk()] == ["", "b", "b.x", "b.y", "c", "c/d"]
    assert [p.name for p in root.all_parameters()] == ["a", "b.x.w", "b.x.v", "b.y.w", "c/d/e"]
    assert child(root, "c/d").short_name == "d"


def test_biases_are_known_by_name() -> None:
    parameters = layers_from_names([*affine("fc"), "lstm.bias_ih_l0", "q_bias"]).all_parameters()
    assert {p.name for p in parameters if p.is_bias} == {"fc.bias", "q_bias"}


def test_roles() -> None:
    root = layers_from_names(
        ["blocks.0.conv.weight", *affine("blocks.0.bn1", "norm", "norm_and_more.fc"), "1.weight"]
    )
    roles = {layer.name: layer.role for layer in root.walk() if layer.role != "layer"}
    assert roles == {"blocks": "list", "blocks.0.bn1": "norm", "norm": "norm"}


def test_list_has_numbers_only_and_no_parameters_of_its_own() -> None:
    assert layers_from_names(["0.w", "1.w", "2.w"]).role == "list"
    assert layers_from_names(["0.w", "1.w", "scale"]).role == "layer"
    assert layers_from_names(["0.w", "one.w"]).role == "layer"


@pytest.mark.parametrize(
    ("names", "norms"),
    [
        (["0.weight", *affine("1")], ["1"]),
        ([*affine("0"), *affine("1")], []),
        (["0.weight", *affine("2")], []),
        (["0.weight", "1.weight"], []),
        ([*affine("0"), "1.weight", *affine("2")], []),
        (["a.weight", *affine("b")], []),
    ],
)
def test_norm_without_a_name_stands_right_behind_a_layer_without_bias(
    names: list[str], norms: list[str]
) -> None:
    assert [
        layer.name for layer in layers_from_names(names).walk() if layer.role == "norm"
    ] == norms


def test_kinds_are_alike_where_most_names_are() -> None:
    stage = child(layers_from_names(torchvision_resnet((2, 3), 2)), "layer2")
    assert len({block.kind for block in stage.children}) == 1
    contents = enumerate(["ab", "cd", "ab", "be"])  # one name in three is not most of them
    mixed = layers_from_names([f"{i}.{part}.w" for i, parts in contents for part in parts])
    first, second, third, fourth = (block.kind for block in mixed.children)
    assert first == third
    assert len({first, second, fourth}) == 3


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["a.w", ""], ValueError, "must be non-empty strings, got ''"),
        (["a.w", 3], ValueError, "must be non-empty strings, got 3"),
        (["a.w", "b.w", "a.w"], ValueError, "'a.w' comes twice; names must be unique"),
        ("a.w", TypeError, "names='a.w' must be a list of parameter names, such as"),
        (None, TypeError, "names=None must be a list of parameter names"),
    ],
)
def test_wrong_names(names: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layers_from_names(names)


def test_weight_layers_are_counted_without_norms() -> None:
    root = layers_from_names(torchvision_resnet((2,), 2))
    assert child(root, "layer1.0").weight_layers == 2
    assert child(root, "layer1").weight_layers == 4
    assert root.weight_layers == 6
    assert not child(root, "layer1.0.conv1").is_composite
    assert child(root, "layer1.0").is_composite


def test_unwrapped_stops_where_something_is_added() -> None:
    names = ["model.net.a.w", "model.net.b.w"]
    assert layers_from_names(names).unwrapped.name == "model.net"
    assert layers_from_names([*names, "model.scale"]).unwrapped.name == "model"
    assert layers_from_names([*names, "model.norm.weight"]).unwrapped.name == "model"
    assert layers_from_names(["model.head.weight"]).unwrapped.name == "model.head"


def test_without_leaves_the_original_as_it_was() -> None:
    root = layers_from_names(["a.x.w", "a.y.w", "b.w"])
    rest = root.without([child(root, "a.y")])
    assert [p.name for p in rest.all_parameters()] == ["a.x.w", "b.w"]
    assert [p.name for p in root.all_parameters()] == ["a.x.w", "a.y.w", "b.w"]
    assert root.without([]) is root


def test_walk_does_not_recurse() -> None:
    layer = Layer("", "Leaf", parameters=(Parameter("w"),))
    for _ in range(5000):
        layer = Layer("", "Wrapper", children=(layer,))
    assert sum(1 for _ in layer.walk()) == 5001


def test_parameter_is_itself_unless_it_has_a_key() -> None:
    assert Parameter("a").identity == "a"
    assert Parameter("a", key=7).identity == Parameter("b", key=7).identity == 7


@pytest.mark.parametrize(
    ("test", "yes", "no"),
    [
        (looks_like_norm,
         "bn1 bn ln_f ln_1 ln LayerNorm norm norm1 fc_norm input_layernorm final_layer_norm "
         "batch_normalization_3 group_norm normalization conv_bn p_re_lu_1 prelu",
         "conv1 linear fc normalize_inputs attention blnk lnear lstm"),
        (is_norm_kind,
         "BatchNorm2d LayerNorm RMSNorm LlamaRMSNorm T5LayerNorm GroupNorm LayerNorm2d "
         "BatchNormAct2d FrozenBatchNorm2d SyncBatchNorm LayerNormalization PReLU",
         "Conv2dNormActivation Linear ReLU NormalizedLinear"),
        (looks_like_embedding,
         "patch_embed pos_embed embeddings word_embeddings embed_tokens embedder wte wpe cls_token "
         "class_token dist_token register_tokens tok_emb emb embs pos pos_embedding "
         "positional_encoding stem",
         "conv1 member tokenizer stem_block post_norm positive blocks expose"),
        (looks_like_head,
         "head heads fc classifier lm_head mlp_head cls_head decode_head head_dist cls score "
         "logits qa_outputs aux_classifier aux1 AuxLogits rel_pos_bias relative_position_bias",
         "fc1 multi_head pre_classifier pre_logits headless overhead auxiliary header fc_norm"),
    ],
)  # fmt: skip
def test_what_names_tell(test: Any, yes: str, no: str) -> None:
    assert [name for name in yes.split() if not test(name)] == []
    assert [name for name in no.split() if test(name)] == []
