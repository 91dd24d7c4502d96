"""The user's own patterns, and roots that nothing is split across."""

from __future__ import annotations

from typing import Any

import pytest

from strategies.parallel import TensorPlan, tensor_plan
from tests.strategies.parallel.trees import (
    COLUMN,
    ROW,
    VOCAB,
    bert,
    linear,
    llama,
    other,
    vit,
    weights_agree,
)


def test_own_patterns_win() -> None:
    own = {"*.mlp.*": "replicate", "lm_head": "replicate", "*.0.mlp.up_proj": "column"}
    plan = tensor_plan(llama(blocks=2), 2, own)
    mlp = {path: rule for path, rule in plan.rules.items() if ".mlp." in path}
    assert mlp == {"model.layers.0.mlp.up_proj": COLUMN}  # the last pattern that fits
    assert "model.layers.0.mlp" in plan.regions
    assert "lm_head" not in plan.rules
    assert plan.rules["model.embed_tokens"] == VOCAB


def test_own_patterns_split_what_is_not_recognised() -> None:
    tree = [other(""), other("f"), linear("f.a", 16, 8), linear("f.b", 8, 16), linear("g", 8, 8)]
    plan = tensor_plan(tree, 2, {"f.a": "column", "?.b": "row", "g": "vocab"})
    assert plan.rules == {"f.a": COLUMN, "f.b": ROW, "g": VOCAB}
    assert plan.regions == ["f", "g"]


def test_own_replicate_of_one_layer_keeps_its_attention_whole() -> None:
    plan = tensor_plan(llama(blocks=1), 2, {"*.q_proj": "replicate"})
    assert not any("self_attn" in path for path in plan.rules)


def test_own_replicate_of_the_embedding_keeps_the_tied_head_whole() -> None:
    plan = tensor_plan(llama(tied=True), 2, {"*.embed_tokens": "replicate"})
    assert not {"model.embed_tokens", "lm_head"} & set(plan.rules)


@pytest.mark.parametrize(
    "own",
    [{"lm_head": "replicate"}, {"lm_head": "vocab"}, {"model.embed_tokens": "replicate"}],
    ids=str,
)
def test_own_patterns_hold_for_both_uses_of_a_weight(own: dict[str, str]) -> None:
    tree = llama(tied=True)
    assert weights_agree(tree, tensor_plan(tree, 2, own))


@pytest.mark.parametrize(
    "change", [{"own": {"a.fc1": "replicate"}}, {"roots": ("b",)}], ids=["own", "roots"]
)
def test_blocks_that_share_a_weight(change: dict[str, Any]) -> None:
    tree = [other("a"), linear("a.fc1", 8, 4), linear("a.fc2", 4, 8)]
    tree += [other("b"), linear("b.fc1", 8, 4, tied="a.fc1"), linear("b.fc2", 4, 8)]
    assert weights_agree(tree, tensor_plan(tree, 2, **change))


@pytest.mark.parametrize("own", [{"lm_head": "row"}, {"model.embed_tokens": "column"}], ids=str)
def test_an_embedding_is_split_by_its_entries(own: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is an embedding or shares its weight; pass 'vocab' or"):
        tensor_plan(llama(tied=True), 2, own)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"lm_head": "colwise"},
            r"'lm_head'\] must be one of column, row, vocab, replicate, got 'colwise'",
        ),
        (
            {"blocks.*": "column"},
            r"'blocks\.\*' fits no linear layer or embedding; there are model.embed",
        ),
        ({"model.norm": "column"}, r"the pattern 'model\.norm' fits no linear layer or embedding"),
    ],
)
def test_own_patterns_that_are_wrong(own: dict[str, str], message: str, size: int) -> None:
    with pytest.raises(ValueError, match=message):
        tensor_plan(llama(), size, own)


def test_a_model_without_layers_has_no_pattern_that_fits() -> None:
    with pytest.raises(ValueError, match="there are none"):
        tensor_plan([other("")], 2, {"*": "row"})


def test_own_pattern_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="does not divide the 10 rows of 'head'"):
        tensor_plan(vit(), 4, {"head": "column"})
    assert tensor_plan(vit(), 4, {"head": "row"}).rules["head"] == ROW


def test_only_what_is_inside_the_roots_is_split() -> None:
    tree = llama(blocks=11)
    plan = tensor_plan(tree, 2, roots=["model.layers.1", "lm_head"])
    assert "lm_head" in plan.rules
    assert "model.embed_tokens" not in plan.rules
    split = {path for path in plan.rules if path != "lm_head"}
    assert split
    assert all(path.startswith("model.layers.1.") for path in split)
    assert tensor_plan(tree, 2, roots=()) == TensorPlan()


def test_a_pair_is_not_split_across_a_root() -> None:
    roots = ["bert.encoder.layer.0.attention.self", "bert.encoder.layer.0.output"]
    plan = tensor_plan(bert(), 2, roots=roots)
    assert plan.rules == {}
    assert list(plan.left) == roots[:1]


def test_own_pattern_outside_of_the_roots_has_a_region_of_its_own() -> None:
    plan = tensor_plan(llama(blocks=1), 2, {"*.up_proj": "column"}, roots=["lm_head"])
    assert plan.regions == ["model.layers.0.mlp.up_proj", "lm_head"]
