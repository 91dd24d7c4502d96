"""Which layers are recognised and split, on trees as well-known models have them."""

from __future__ import annotations

import pytest

from strategies.parallel import ModuleInfo, TensorPlan, tensor_plan
from tests.strategies.parallel.trees import (
    COLUMN,
    FUSED,
    ROW,
    VOCAB,
    below,
    bert,
    embedding,
    gpt2,
    linear,
    llama,
    other,
    sequential,
    vit,
    weights_agree,
)


@pytest.mark.parametrize("size", [2, 4])
def test_llama(size: int) -> None:
    plan = tensor_plan(llama(blocks=2), size)
    expected = {"model.embed_tokens": VOCAB, "lm_head": VOCAB}
    regions = {"model.embed_tokens", "lm_head"}
    for block in ("model.layers.0", "model.layers.1"):
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        expected |= below(attention, q_proj=COLUMN, k_proj=COLUMN, v_proj=COLUMN, o_proj=ROW)
        expected |= below(mlp, gate_proj=COLUMN, up_proj=COLUMN, down_proj=ROW)
        regions |= {attention, mlp}
    assert (plan.rules, set(plan.regions), plan.left) == (expected, regions, {})
    assert len(plan.regions) == len(regions)


def test_llama_with_fewer_heads_of_keys_and_values() -> None:
    plan = tensor_plan(llama(heads=8, kv_heads=2), 2)
    assert plan.rules == tensor_plan(llama(), 2).rules
    assert plan.left == {}
    with pytest.raises(ValueError, match="does not divide the 2 key and value heads"):
        tensor_plan(llama(heads=8, kv_heads=2), 4)


def test_gpt2() -> None:
    plan = tensor_plan(gpt2(blocks=1), 4)
    assert plan.rules == {
        **below("transformer.h.0", attn__c_attn=FUSED, attn__c_proj=ROW),
        **below("transformer.h.0", mlp__c_fc=COLUMN, mlp__c_proj=ROW),
        **{"transformer.wte": VOCAB, "lm_head": VOCAB},
    }
    assert set(plan.regions) == {
        *("transformer.h.0.attn", "transformer.h.0.mlp", "transformer.wte", "lm_head")
    }


def test_bert_has_its_output_layers_one_level_up() -> None:
    plan = tensor_plan(bert(), 2)
    block = "bert.encoder.layer.0"
    assert plan.rules == {
        **below(f"{block}.attention.self", query=COLUMN, key=COLUMN, value=COLUMN),
        **below(block, attention__output__dense=ROW, intermediate__dense=COLUMN),
        **below(block, output__dense=ROW),
        **{"bert.embeddings.word_embeddings": VOCAB, "cls.decoder": VOCAB},
    }
    assert {f"{block}.attention", block} < set(plan.regions)


def test_vit() -> None:
    plan = tensor_plan(vit(blocks=1), 2)
    assert plan.rules == {
        **below("blocks.0.attn", qkv=FUSED, proj=ROW),
        **below("blocks.0.mlp", fc1=COLUMN, fc2=ROW),
    }
    assert set(plan.regions) == {"blocks.0.attn", "blocks.0.mlp"}


@pytest.mark.parametrize("tree", [llama(), gpt2(), bert(), vit()])
def test_one_rank_splits_nothing(tree: list[ModuleInfo]) -> None:
    assert tensor_plan(tree, 1) == TensorPlan()


@pytest.mark.parametrize(
    "tree",
    [llama(), llama(tied=True), llama(tied=True, vocabulary=101), gpt2(), bert(), vit()],
)
def test_shared_weights_share_their_fate(tree: list[ModuleInfo]) -> None:
    assert weights_agree(tree, tensor_plan(tree, 2))


def test_columns_and_rows_come_in_pairs_inside_a_region() -> None:
    for tree in (llama(), gpt2(), bert(), vit()):
        plan = tensor_plan(tree, 2)
        for path, rule in plan.rules.items():
            assert any(path == region or path.startswith(f"{region}.") for region in plan.regions)
            assert rule.dim == (1 if rule.kind == "row" else 0)


def test_vocabulary_that_does_not_divide_stays_whole() -> None:
    plan = tensor_plan(llama(vocabulary=101), 2)
    assert not {"model.embed_tokens", "lm_head"} & {*plan.rules, *plan.regions}
    assert plan.left == dict.fromkeys(
        ("model.embed_tokens", "lm_head"), "101 rows do not divide by 2"
    )


def test_tied_head_follows_the_embedding() -> None:
    assert tensor_plan(llama(tied=True), 2).rules["lm_head"] == VOCAB
    assert "lm_head" not in tensor_plan(llama(tied=True, vocabulary=101), 2).rules
    unknown = [embedding("table", 8, 4), linear("lm_head", 8, 4, tied="table")]
    assert tensor_plan(unknown, 2).rules == {"table": VOCAB, "lm_head": VOCAB}
    known = [embedding("wte", 8, 4), linear("predict", 8, 4, tied="wte")]
    assert tensor_plan(known, 2).rules == {"wte": VOCAB, "predict": VOCAB}


# Values as wide as queries, though there are fewer of them.
FEW = [other("a", heads=4, kv_heads=2), *(linear(f"a.{n}_proj", 32, 32) for n in "qkvo")]


@pytest.mark.parametrize(
    ("tree", "size", "message"),
    [
        (llama(), 3, "tensor=3 does not divide the 4 heads of 'model.layers.0.self_attn'"),
        (
            FEW,
            4,
            "tensor=4 does not divide the 2 key and value heads of 'a'; pass tensor= one of 1, 2",
        ),
        (llama(hidden=46), 4, "does not divide the 46 rows of 'model.layers.0.mlp.gate_proj'"),
        (gpt2(), 8, "does not divide the 4 heads of 'transformer.h.0.attn'"),
        (bert(), 8, "does not divide the 4 heads of 'bert.encoder.layer.0.attention.self'"),
    ],
)
def test_sizes_that_do_not_divide(tree: list[ModuleInfo], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensor_plan(tree, size)


def test_the_advice_for_heads_that_do_not_divide_works() -> None:
    with pytest.raises(ValueError, match="heads") as error:
        tensor_plan(llama(blocks=1, hidden=48, vocabulary=99), 3)
    assert "pass tensor= one of 1, 2, 4, or tensor_plan=" in str(error.value)
    own = {"model.layers.0.self_attn.*": "replicate"}
    assert repr(own).replace('"', "'") in str(error.value)
    plan = tensor_plan(llama(blocks=1, hidden=48, vocabulary=99), 3, own)
    assert not any("self_attn" in path for path in (*plan.rules, *plan.regions))
    assert plan.rules["model.layers.0.mlp.down_proj"] == ROW


def test_the_advice_for_rows_that_do_not_divide_works() -> None:
    path = "model.layers.0.mlp.gate_proj"
    own = {"model.layers.*.mlp.*": "replicate"}
    with pytest.raises(ValueError, match=f"tensor_plan={{'{path}': 'replicate'}}"):
        tensor_plan(llama(hidden=46), 4)
    assert not any("mlp" in path for path in tensor_plan(llama(hidden=46), 4, own).rules)


@pytest.mark.parametrize("name", ["c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj"])
def test_fused_layers_are_split_by_section(name: str) -> None:
    tree = [other("a", heads=4), linear(f"a.{name}", 96, 32), linear("a.out_proj", 32, 32)]
    assert tensor_plan(tree, 4).rules == {f"a.{name}": FUSED, "a.out_proj": ROW}
    with pytest.raises(ValueError, match="does not divide the 32 rows"):
        tensor_plan([other("a"), *tree[1:]], 3)  # 96 divide, but not its sections


def test_fused_layer_in_the_order_of_heads_is_split_as_a_whole() -> None:
    tree = [other("a", heads=4), linear("a.query_key_value", 96, 32), linear("a.dense", 32, 32)]
    assert tensor_plan(tree, 2).rules == {"a.query_key_value": COLUMN, "a.dense": ROW}


def test_attention_that_is_left_whole_says_why() -> None:
    uneven = [other("a", heads=4), linear("a.query_key_value", 48, 32), linear("a.dense", 32, 32)]
    plan = tensor_plan(uneven, 2)
    assert plan.rules == {}
    assert plan.left == {"a": "attention without an output layer of a known name and size"}
    bare = [other("a"), *(linear(f"a.{name}", 8, 8) for name in "qkv")]
    assert tensor_plan(bare, 2).left == {
        "a": "attention without an output layer of a known name and size"
    }
    narrow = [*bare, linear("a.out", 8, 16)]
    assert tensor_plan(narrow, 2).rules == {}


@pytest.mark.parametrize("up", [("w1", "w3"), ("wi_0", "wi_1"), ("wi",), ("lin1",), ("linear1",)])
def test_other_names_of_an_mlp(up: tuple[str, ...]) -> None:
    down = {"w1": "w2", "wi_0": "wo", "wi": "wo", "lin1": "lin2", "linear1": "linear2"}[up[0]]
    tree = [other("f"), *(linear(f"f.{n}", 16, 8) for n in up), linear(f"f.{down}", 8, 16)]
    assert tensor_plan(tree, 2).rules == {**{f"f.{n}": COLUMN for n in up}, f"f.{down}": ROW}
    wider = [*tree[:-1], linear(f"f.{down}", 8, 32)]
    assert tensor_plan(wider, 2) == TensorPlan()


def test_sequential_of_two_linear_layers() -> None:
    for path, first, second in (("net", "net.0", "net.2"), ("", "0", "2")):
        plan = tensor_plan(sequential(4, 8, 3, path=path), 2)
        assert plan.rules == {first: COLUMN, second: ROW}
        assert plan.regions == [path]


@pytest.mark.parametrize("sizes", [(4, 8), (4, 8, 8, 3)])
def test_sequential_of_another_length_stays_whole(sizes: tuple[int, ...]) -> None:
    assert tensor_plan(sequential(*sizes), 2) == TensorPlan()


def test_sequential_that_does_not_divide_says_so() -> None:
    plan = tensor_plan(sequential(4, 9, 3), 2)
    assert (plan.rules, plan.left) == ({}, {"net": "9 hidden units do not divide by 2"})
