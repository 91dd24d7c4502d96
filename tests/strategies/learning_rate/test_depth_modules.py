"""Depths from real torch modules, and the same from their names where names can tell."""

from __future__ import annotations

import copy

import pytest
from torch import nn
from torch.nn.utils import parametrizations

from tests.strategies.learning_rate.nets import (
    MLP,
    Attention,
    Block,
    DoubleConv,
    Down,
    LoRA,
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

BLOCK = ["norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]


def block(prefix: str) -> set[str]:
    return {f"{prefix}.{layer}" for layer in BLOCK}


def test_vit() -> None:
    assert levels(ViT(2)) == [
        {"cls_token", "pos_embed", "patch_embed.proj"},
        block("blocks.0"),
        block("blocks.1"),
        {"norm", "head"},
    ]


@pytest.mark.parametrize("blocks", [(2, 2, 2, 2), (3, 4, 6, 3), (1, 1)])
def test_resnet(blocks: tuple[int, ...]) -> None:
    depths = depths_of(ResNet(blocks))
    for name, depth in depths.items():
        if name.startswith("layer"):
            expected = 1 + sum(blocks[: int(name[5]) - 1]) + int(name.split(".")[1])
        else:
            expected = sum(blocks) + 1 if name.startswith("fc") else 0
        assert depth == expected, name


@pytest.mark.parametrize(
    "module",
    [
        ViT(1), ViT(4, head=False), ResNet(), ResNet((1, 1)), mlp(4, 4, 4, 4), linear(),
        Net(backbone=ResNet(), head=mlp(4, 4, 2)), nn.Sequential(ViT(2, head=False), linear()),
        nn.Sequential(*list(ResNet((2, 2)).children())[:-1]),
        nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
        Net(embed=nn.Embedding(3, 4), lstm=nn.LSTM(4, 4, 2), fc=linear()),
        Net(student=ViT(2), teacher=ViT(3)),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_names_alone_tell_the_same_as_the_modules(module: nn.Module) -> None:
    assert depths_by_name(module) == depths_of(module)


def test_head_may_be_defined_first() -> None:
    first, last = Net(head=linear(), vit=ViT(3, False)), Net(vit=ViT(3, False), head=linear())
    assert depths_of(first) == depths_of(last)
    assert depths_of(first)["head.weight"] == 4


@pytest.mark.parametrize("name", ["fc", "head", "classifier", "mlp_head", "lm_head", "score"])
@pytest.mark.parametrize("backbone", [ResNet(head=False), mlp(4, 4, 4)], ids=["resnet", "mlp"])
def test_any_usual_head_is_the_head_wherever_defined(name: str, backbone: nn.Module) -> None:
    depths = depths_of(Net(**{name: linear()}, backbone=backbone))
    assert depths == depths_of(Net(backbone=backbone, **{name: linear()}))
    assert (
        depths[f"{name}.bias"]
        == max(depths.values())
        > max(depth for key, depth in depths.items() if key.startswith("backbone"))
    )


def test_fc_among_other_layers_is_one_of_them() -> None:
    assert levels(Net(l1=linear(), fc=linear(), out=linear())) == [{"l1"}, {"fc"}, {"out"}]
    assert levels(Net(fc=linear(), deconv1=linear(), deconv2=linear())) == [
        {"fc"}, {"deconv1"}, {"deconv2"}
    ]  # fmt: skip
    blocks = nn.ModuleList([Block(), Block()])
    assert levels(Net(conv=linear(), fc=linear(), blocks=blocks))[0] == {"conv", "fc"}


@pytest.mark.parametrize("make", [lambda: ViT(2), lambda: mlp(4, 4, 4, 4), Perceptron])
@pytest.mark.parametrize(
    "name", ["classifier", "head", "cls", "fc", "embedder", "embedding", "stem", "norm", "model"]
)
def test_name_of_the_whole_network_changes_nothing(name: str, make: type[nn.Module]) -> None:
    plain = make()
    expected = {f"{name}.{key}": depth for key, depth in depths_of(plain).items()}
    assert depths_of(Net(**{name: plain})) == expected


def test_whole_network_called_classifier_beside_a_loss() -> None:
    depths = depths_of(Net(classifier=ViT(2), criterion=Net(centers=bare(2, 4))))
    assert depths["classifier.cls_token"] == 0
    assert depths["classifier.blocks.1.norm1.weight"] == 2


def test_deep_head_is_all_at_the_top_after_blocks() -> None:
    tasks = nn.ModuleDict({"a": mlp(4, 4, 2), "b": mlp(4, 4, 2)})
    query = Net(query_embed=bare(), temperature=bare(), decoder=mlp(4, 4, 4), out=linear())
    for head in (mlp(4, 4, 4, 2), tasks, query):
        for name in ("heads", "decode_head"):
            for parts in ({"vit": ViT(2, False), name: head}, {name: head, "vit": ViT(2, False)}):
                depths = depths_of(Net(**parts))
                assert {d for key, d in depths.items() if key.startswith(name)} == {3}


def test_deep_head_has_its_levels_in_a_plain_network() -> None:
    found = levels(Net(features=mlp(4, 4, 4), classifier=mlp(4, 4, 2)))
    assert found == [{"features.0"}, {"features.2"}, {"classifier.0"}, {"classifier.2"}]


def test_heads_of_two_tasks_are_on_one_level() -> None:
    found = levels(Net(body=mlp(4, 4, 4), policy_head=linear(), value_head=linear(4, 1)))
    assert found[2:] == [{"policy_head", "value_head"}]


def test_auxiliary_classifiers_are_heads() -> None:
    module = Net(a=Residual(4, 4), b=Residual(4, 4), aux1=Perceptron(), fc=linear())
    assert levels(module)[2] == {"aux1.l1", "aux1.l2", "aux1.l3", "fc"}


def test_norms_share_the_level_before_by_class_not_by_name() -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(4), linear(), nn.PReLU(), nn.RMSNorm(4))
    assert list(depths_of(module).values()) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_embeddings_are_lowest_wherever_defined() -> None:
    module = Net(blocks=nn.ModuleList([Block(), Block()]), words=nn.Embedding(3, 4), out=linear())
    assert depths_of(module)["words.weight"] == 0


def test_all_embeddings_of_a_plain_network_are_on_one_level() -> None:
    module = Net(users=nn.Embedding(3, 4), item_embed=linear(), tower=mlp(4, 4, 4), out=linear())
    assert levels(module)[:2] == [{"users", "item_embed"}, {"tower.0"}]


def test_output_called_embedding_is_not_the_stem() -> None:
    for backbone in (ViT(2, False), ResNet(head=False), mlp(4, 4, 4)):
        depths = depths_of(Net(backbone=backbone, embedding=linear()))
        assert depths["embedding.weight"] == max(depths.values())


def test_patch_embedding_inside_a_stage_stands_where_it_is() -> None:
    stages = [Net(patch_embed=linear(), blocks=nn.ModuleList([Block(), Block()])) for _ in range(2)]
    found = levels(Net(stages=nn.ModuleList(stages), head=linear()))
    assert [min(level) for level in found] == [
        "stages.0.patch_embed", "stages.0.blocks.0.attn.proj", "stages.0.blocks.1.attn.proj",
        "stages.1.patch_embed", "stages.1.blocks.0.attn.proj", "stages.1.blocks.1.attn.proj",
        "head",
    ]  # fmt: skip


def test_parameters_outside_of_layers() -> None:
    """BEiT's code gives the head's rate to every name that it does not know."""
    module = Net(scale=bare(), pos=bare(), vit=Net(proj=bare(), blocks=ViT(2, False).blocks))
    depths = depths_of(module)
    assert depths["pos"] == 0
    assert depths["scale"] == depths["vit.proj"] == max(depths.values())
    module.scale = None
    without = depths_of(module)
    assert {key: depth for key, depth in depths.items() if key != "scale"} == without


def test_parameters_beside_the_layers_of_a_part_share_a_level_with_them() -> None:
    module = Net(encoder=Net(scale=bare(), l1=linear(), l2=linear()), head=linear())
    assert levels(module) == [{"encoder", "encoder.l1"}, {"encoder.l2"}, {"head"}]
    stages = [Net(gamma=bare(), blocks=nn.ModuleList([Block(), Block()])) for _ in range(2)]
    depths = depths_of(Net(stem=linear(), stages=nn.ModuleList(stages), head=linear()))
    assert depths["stages.1.gamma"] == depths["stages.0.blocks.1.norm1.weight"] == 2
    assert depths["stages.1.blocks.0.norm1.weight"] == 3


@pytest.mark.parametrize("name", ["_orig_mod", "module", "model", "net"])
def test_wrapper_changes_nothing(name: str) -> None:
    for network in (ViT(2), ResNet(), mlp(4, 4, 4), Net(student=ViT(1), teacher=ViT(2))):
        plain = {f"{name}.{key}": depth for key, depth in depths_of(network).items()}
        assert depths_of(Net(**{name: network})) == plain
        assert list(depths_of(nn.Sequential(network)).values()) == list(plain.values())


@pytest.mark.parametrize("wrapped", [0, 1])
def test_wrapper_around_some_blocks_only(wrapped: int) -> None:
    blocks: list[nn.Module] = [Block(), Block()]
    blocks[wrapped] = Net(_checkpoint_wrapped_module=blocks[wrapped])
    module = Net(embed=nn.Embedding(3, 4), layers=nn.ModuleList(blocks), out=linear())
    assert list(depths_of(module).values()) == [0] + [1] * 12 + [2] * 12 + [3] * 2
    assert depths_by_name(module) == depths_of(module)


def test_adapters_change_no_depth() -> None:
    plain, adapted = ViT(2), ViT(2)
    for layer in adapted.blocks:
        layer.attn.qkv = LoRA()
    mixed = nn.Sequential(linear(), nn.ReLU(), LoRA(), nn.ReLU(), linear())
    for module, reference in ((adapted, plain), (mixed, mlp(4, 4, 4, 4))):
        expected = depths_of(reference)
        for name, depth in depths_of(module).items():
            for part in (".base_layer", ".lora_A.default", ".lora_B.default"):
                name = name.replace(part, "")
            assert depth == expected[name.replace("bias", "weight")], name


def test_parametrizations_change_no_depth() -> None:
    module = Net(a=linear(), b=linear(), c=linear())
    parametrizations.weight_norm(module.a)
    parametrizations.spectral_norm(module.b)
    parametrizations.orthogonal(module.b, "weight")
    nn.utils.parametrize.register_parametrization(module.a, "bias", nn.Identity())
    depths = depths_of(module)
    assert {name[0]: depth for name, depth in depths.items()} == {"a": 0, "b": 1, "c": 2}
    assert all(depth == "abc".index(name[0]) for name, depth in depths.items())


def test_lazy_layers_count_before_they_are_built() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    assert list(depths_of(module).values()) == [0, 0, 0, 0, 1, 1]


def test_sublayers_in_one_kind_of_wrapper_are_one_block() -> None:
    class PreNorm(nn.Module):
        def __init__(self, fn: nn.Module) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.fn = fn

    def sublayers() -> nn.ModuleList:
        return nn.ModuleList([PreNorm(Attention(4)), PreNorm(MLP(4))])

    for layers in ([sublayers(), sublayers()], [sublayers(), sublayers(), sublayers()]):
        module = Net(embed=linear(), layers=nn.ModuleList(layers), mlp_head=linear())
        depths = depths_of(module)
        assert depths["mlp_head.weight"] == len(layers) + 1
        assert {d for name, d in depths.items() if name.startswith("layers.1.")} == {2}


def test_unet() -> None:
    module = Net(
        inc=DoubleConv(), down1=Down(), down2=Down(), up1=Up(), up2=Up(), outc=Net(conv=linear())
    )
    depths = depths_of(module)
    order = ["inc", "down1", "down2", "up1", "up2", "outc"]
    assert all(depth == order.index(name.split(".")[0]) for name, depth in depths.items())


def test_what_stands_between_blocks_is_one_level() -> None:
    module = Net(
        downs=nn.ModuleList([DoubleConv(), DoubleConv()]), middle=mlp(4, 4, 4, 4),
        ups=nn.ModuleList([DoubleConv(), DoubleConv()]), out=linear(),
    )  # fmt: skip
    assert levels(module)[2] == {"middle.0", "middle.2", "middle.4"}
    assert max(depths_of(module).values()) == 5


def test_student_and_teacher_stand_side_by_side() -> None:
    student = ViT(2)
    own = {f"student.{name}": depth for name, depth in depths_of(student).items()}
    for teacher in (copy.deepcopy(student), ViT(3), ResNet((2, 2))):
        top = max(depths_of(teacher).values())
        for module in (
            Net(student=student, teacher=teacher),
            Net(teacher=teacher, student=student),
            Net(model=Net(teacher=teacher, student=student)),
        ):
            depths = {name.removeprefix("model."): d for name, d in depths_of(module).items()}
            assert {name: depths[name] for name in own} == {n: d + top - 3 for n, d in own.items()}


def test_ensemble_and_towers_with_heads_stand_side_by_side() -> None:
    module = Net(models=nn.ModuleList([ResNet(), ResNet()]))
    depths = depths_of(module)
    assert all(depths[n] == depths[n.replace("s.0", "s.1", 1)] for n in depths if "s.0" in n[:8])
    assert set(depths.values()) == set(range(6))
    towers = depths_of(Net(text=ViT(2), vision=ViT(4), logit_scale=bare()))
    assert towers["text.blocks.1.norm1.weight"] == towers["vision.blocks.3.norm1.weight"] == 4
    assert towers["text.head.weight"] == towers["vision.head.bias"] == towers["logit_scale"] == 5


def test_networks_side_by_side_are_found_beside_other_parameters() -> None:
    student, teacher = ViT(2), ViT(2)
    for pair in (Net(student=student, teacher=teacher), nn.ModuleList([student, teacher])):
        depths = depths_of(Net(model=pair, temperature=bare()))
        assert max(depths.values()) == depths["temperature"] == 3


def test_stages_that_end_in_a_layer_called_fc_follow_one_another() -> None:
    def stage() -> nn.Module:
        blocks = nn.ModuleList([Block(), Block()])
        return Net(blocks=blocks, pool=Net(conv=linear(), fc=linear()))

    depths = depths_of(Net(stages=nn.ModuleList([stage(), stage()]), head=linear()))
    assert depths["stages.1.blocks.0.norm1.weight"] == 3 > depths["stages.0.pool.fc.weight"]


def test_encoder_and_decoder_follow_one_another() -> None:
    decoder = Net(fc=linear(), blocks=nn.ModuleList([Residual(2, 2), Residual(2, 2)]), out=linear())
    depths = depths_of(Net(encoder=ResNet(), decoder=decoder))
    assert depths["encoder.layer2.1.conv1.weight"] == 4 < depths["decoder.blocks.0.conv1.weight"]
    assert depths["decoder.out.weight"] == max(depths.values())
