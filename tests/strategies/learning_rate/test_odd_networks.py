"""Networks that a hostile user would try."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from torch import nn

from strategies.learning_rate import Layer, layers_from_names, parameter_depths
from tests.strategies.learning_rate.nets import (
    Block,
    DoubleConv,
    Net,
    Perceptron,
    Residual,
    ResNet,
    Up,
    ViT,
    bare,
    depths_by_name,
    depths_of,
    levels,
    linear,
    mlp,
)


def top_parts(module: nn.Module) -> list[set[str]]:
    """First parts of the names on each level."""
    return [{name.split(".")[0] for name in level} for level in levels(module)]


@pytest.mark.parametrize(
    "module",
    [linear(), nn.Sequential(linear()), Net(w=bare(2)), nn.ParameterList([bare(2), bare(2)]),
     nn.LSTM(4, 4, 3), nn.MultiheadAttention(4, 2), nn.Sequential(nn.LayerNorm(4))],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_single_layer_is_the_head(module: nn.Module) -> None:
    assert set(depths_of(module).values()) == {0}


def test_network_without_parameters() -> None:
    for network in (Layer("", "Net"), layers_from_names([])):
        with pytest.raises(ValueError, match="no parameters; build the model"):
            parameter_depths(network)


@pytest.mark.parametrize("make", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_list_of_one_block(make: Callable[[list[nn.Module]], nn.Module]) -> None:
    module = Net(embed=nn.Embedding(3, 4), blocks=make([Block()]), head=linear())
    assert list(depths_of(module).values()) == [0] + [1] * 12 + [2] * 2
    assert depths_by_name(module) == depths_of(module)


def test_list_of_one_perceptron_is_only_a_wrapper() -> None:
    for network in (nn.ModuleList([Perceptron()]), nn.Sequential(mlp(4, 4, 4, 4))):
        assert sorted(set(depths_of(network).values())) == [0, 1, 2]


def test_network_cut_from_a_list_of_children() -> None:
    children = list(ResNet((2, 2)).children())[:-1]
    for module in (
        Net(features=nn.Sequential(*children), classifier=linear()),
        nn.Sequential(nn.Sequential(*children), nn.Flatten(), linear()),
        nn.Sequential(*children, nn.Flatten(), linear()),
    ):
        assert list(depths_of(module).values()) == list(depths_of(ResNet((2, 2))).values())


def test_blocks_held_as_attributes() -> None:
    module = Net(conv=linear(), block1=Block(), block2=Residual(2, 2), block3=Block(), fc=linear())
    assert top_parts(module) == [{"conv"}, {"block1"}, {"block2"}, {"block3"}, {"fc"}]


def test_blocks_held_as_attributes_between_lists_and_before_their_head() -> None:
    module = Net(
        head=mlp(4, 4, 4), stem=mlp(4, 4, 4), block1=Block(), block2=Block(), neck=mlp(4, 4, 4)
    )
    assert top_parts(module) == [{"stem"}, {"block1"}, {"block2"}, {"head", "neck"}]


def test_stages_held_as_attributes_follow_one_another() -> None:
    def stage(blocks: int) -> nn.Module:
        return Net(blocks=nn.ModuleList([Block() for _ in range(blocks)]), down=linear())

    module = Net(stem=linear(), stage1=stage(2), stage2=stage(1), stage3=stage(2), fc=linear())
    assert [min(level) for level in levels(module)] == [
        "stem", "stage1.blocks.0.attn.proj", "stage1.blocks.1.attn.proj", "stage1.down",
        "stage2.blocks.0.attn.proj", "stage2.down", "stage3.blocks.0.attn.proj",
        "stage3.blocks.1.attn.proj", "fc",
    ]  # fmt: skip


@pytest.mark.parametrize("kinds", ["ababab", "abcabc", "aabb", "abbb"])
def test_lists_of_several_kinds_of_block(kinds: str) -> None:
    make = {"a": Block, "b": DoubleConv, "c": lambda: Residual(2, 2)}
    blocks = nn.ModuleList([make[kind]() for kind in kinds])
    depths = depths_of(Net(embed=nn.Embedding(3, 4), layers=blocks, out=linear()))
    assert depths["out.weight"] == len(kinds) + 1
    for name, depth in depths.items():
        if name.startswith("layers"):
            assert depth == int(name.split(".")[1]) + 1, name


def test_sublayers_of_different_kinds_are_one_block() -> None:
    sublayers = [nn.ModuleList([Block(), Residual(2, 2), DoubleConv()]) for _ in range(3)]
    module = Net(embed=nn.Embedding(3, 4), layers=nn.ModuleList(sublayers), out=linear())
    assert set(depths_of(module).values()) == set(range(5))


def test_list_with_as_many_single_layers_as_blocks() -> None:
    downs = nn.ModuleList([DoubleConv(), DoubleConv()])
    ups = nn.ModuleList([linear(), DoubleConv(), linear(), DoubleConv()])
    depths = depths_of(Net(downs=downs, ups=ups, out=linear()))
    assert [depths[f"ups.{i}.weight"] for i in (0, 2)] == [2, 4]
    assert [depths[f"ups.{i}.double_conv.0.weight"] for i in (1, 3)] == [3, 5]
    assert depths["ups.3.double_conv.3.weight"] == 5 < depths["out.weight"]


def test_list_of_one_network_is_looked_into() -> None:
    depths = depths_of(Net(models=nn.ModuleList([ViT(3, False)]), out=linear()))
    assert depths["models.0.blocks.2.norm1.weight"] == 3 < depths["out.weight"] == 4
    network = Net(stem=linear(), block1=Block(), block2=Block())
    depths = depths_of(Net(models=nn.ModuleList([network]), out=linear()))
    assert depths["models.0.block2.norm1.weight"] == 2 < depths["out.weight"] == 3


def test_stage_may_hold_a_single_block_behind_a_single_layer() -> None:
    stages = [Net(layers=nn.Sequential(linear(), Block())) for _ in range(2)]
    found = levels(Net(stages=nn.ModuleList(stages), head=linear()))
    assert [min(level) for level in found] == [
        "stages.0.layers.0", "stages.0.layers.1.attn.proj",
        "stages.1.layers.0", "stages.1.layers.1.attn.proj", "head",
    ]  # fmt: skip


def test_attention_and_perceptron_each_in_a_list_are_one_block() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            attention = Net(q=linear(), kv=linear(), proj=linear())
            self.attn = nn.Sequential(nn.LayerNorm(4), attention)
            self.mlp = nn.Sequential(nn.LayerNorm(4), linear(), nn.GELU(), linear())

    depths = depths_of(Net(embed=linear(), layers=nn.ModuleList([Layer(), Layer()]), out=linear()))
    assert depths["out.weight"] == 3
    assert {d for name, d in depths.items() if name.startswith("layers.1")} == {2}


def test_block_may_hold_a_short_list_of_alike_parts() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Net(q=linear(), k=linear(), v=linear(), proj=linear())
            self.ffn = nn.ModuleList([Perceptron(), Perceptron()])
            self.bottleneck = mlp(4, 4, 4)

    depths = depths_of(Net(embed=linear(), layers=nn.ModuleList([Layer(), Layer()]), out=linear()))
    assert depths["out.weight"] == 3
    assert {d for name, d in depths.items() if name.startswith("layers.1")} == {2}


def test_experts_share_the_level_of_their_block() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = linear()
            self.experts = nn.ModuleList([mlp(4, 8, 4) for _ in range(4)])

    blocks = nn.ModuleList([Experts() for _ in range(3)])
    depths = depths_of(Net(embed=nn.Embedding(3, 4), layers=blocks, lm_head=linear()))
    assert max(depths.values()) == 4
    assert {d for name, d in depths.items() if name.startswith("layers.1")} == {2}
    alone = levels(Net(embed=linear(), moe=Experts(), out=linear()))
    assert alone[2] == {f"moe.experts.{i}.{j}" for i in range(4) for j in (0, 2)}


def test_dictionary_of_layers_in_the_manner_of_nanogpt() -> None:
    parts = {"wte": nn.Embedding(3, 4), "wpe": nn.Embedding(3, 4), "drop": nn.Dropout()}
    blocks = nn.ModuleList([Block(), Block()])
    transformer = nn.ModuleDict({**parts, "h": blocks, "ln_f": nn.LayerNorm(4)})
    depths = depths_of(Net(transformer=transformer, lm_head=linear()))
    assert depths["transformer.wpe.weight"] == 0
    assert depths["transformer.h.1.mlp.fc2.bias"] == 2
    assert depths["transformer.ln_f.bias"] == depths["lm_head.weight"] == 3


def test_attention_is_one_layer() -> None:
    module = Net(embed=nn.Embedding(3, 4), attn=nn.MultiheadAttention(4, 2), ff=linear())
    assert levels(module) == [{"embed"}, {"attn", "attn.out_proj"}, {"ff"}]


def test_recurrent_layers_count_once_each() -> None:
    module = Net(
        embedding=nn.Embedding(3, 4), rnn=nn.ModuleList([nn.LSTM(4, 4), nn.GRU(4, 4)]), fc=linear()
    )
    assert levels(module) == [{"embedding"}, {"rnn.0"}, {"rnn.1"}, {"fc"}]


def test_pretrained_encoder_with_a_plain_decoder() -> None:
    decoder = {f"up{i}": Up() for i in range(2)}
    depths = depths_of(Net(encoder=ResNet(head=False), **decoder, outc=linear()))
    own = depths_of(ResNet(head=False))
    assert {f"encoder.{name}": depth for name, depth in own.items()}.items() <= depths.items()
    assert {d for name, d in depths.items() if name.startswith("up")} == {max(own.values()) + 1}


def test_blocks_of_two_networks_without_heads_follow_one_another() -> None:
    depths = depths_of(Net(text=ViT(2, False), image=ViT(2, False), projection=linear()))
    assert depths["text.blocks.1.norm1.weight"] == 2
    assert depths["text.norm.weight"] == 2
    assert depths["image.blocks.0.norm1.weight"] == 3
    assert depths["text.cls_token"] == depths["image.cls_token"] == 0
    assert depths["projection.weight"] == depths["image.norm.weight"] == 5


def test_shared_layer_counts_at_its_deepest_use() -> None:
    shared = linear()
    depths = depths_of(Net(a=shared, b=linear(), c=shared, d=linear()))
    assert depths["a.weight"] == depths["c.weight"] == 2
    assert depths["b.weight"] == 1
    assert depths["d.weight"] == 3


def test_tied_head_defined_first_counts_as_head() -> None:
    embed, head = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
    head.weight = embed.weight
    blocks = nn.ModuleList([Block(), Block()])
    depths = depths_of(Net(lm_head=head, embed=embed, blocks=blocks))
    assert depths["lm_head.weight"] == depths["embed.weight"] == 3


def test_shared_block_counts_at_its_deepest_use() -> None:
    block = Block()
    depths = depths_of(Net(embed=linear(), layers=nn.ModuleList([block, Block(), block])))
    assert depths["layers.0.norm1.weight"] == depths["layers.2.norm1.weight"] == 3
    assert depths["layers.1.norm1.weight"] == 2


def _names_of_plain(count: int) -> list[str]:
    return [f"layer_{i}.weight" for i in range(count)]


def _names_of_blocks(count: int) -> list[str]:
    return [f"blocks.{i}.{part}.{w}" for i in range(count) for part in "abcdef" for w in "wb"]


def _names_of_kinds(count: int) -> list[str]:
    return [f"part_{i}.inner_{i}.{part}.w" for i in range(count) for part in "ab"]


def _nested(depth: int) -> list[str]:
    return [f"{'a.' * i}{part}.w" for i in range(depth) for part in "bc"]


@pytest.mark.parametrize(
    "names",
    [_names_of_plain(1000), _names_of_blocks(500), _names_of_kinds(500), _nested(60)],
    ids=["1000 layers", "500 blocks", "500 kinds of part", "60 deep"],
)
def test_large_networks_take_well_under_a_second(names: list[str]) -> None:
    started = time.process_time()
    depths = parameter_depths(layers_from_names(names))
    assert time.process_time() - started < 1
    assert len(depths) == len(names)


def test_time_grows_in_proportion_to_the_blocks() -> None:
    def seconds(count: int) -> float:
        names = _names_of_blocks(count)
        started = time.process_time()
        parameter_depths(layers_from_names(names))
        return time.process_time() - started

    seconds(10)
    assert min(seconds(400) for _ in range(3)) < 10 * min(seconds(100) for _ in range(3))
