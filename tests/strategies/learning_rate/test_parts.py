"""Which part of a module counts for an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
from torch import nn

from lightning_ext._layers import layers_from_module
from strategies.learning_rate import (
    Layer,
    layers_from_names,
    layerwise_multipliers,
    networks_of,
    parameter_depths,
    without_frozen_tail,
)
from strategies.learning_rate.parts import smallest_holding
from tests.strategies.learning_rate.nets import (
    Net,
    Perceptron,
    ResNet,
    ViT,
    bare,
    depths_of,
    linear,
    mlp,
)


def names_below(module: nn.Module, *parts: str) -> set[str]:
    return {name for name, _ in module.named_parameters() if name.startswith(parts)}


def pruned(module: nn.Module, *trained: str) -> tuple[Layer, list[str]]:
    return without_frozen_tail(layers_from_module(module), names_below(module, *trained))


def own_depths(name: str, module: nn.Module) -> dict[str, int]:
    return {f"{name}.{key}": depth for key, depth in depths_of(module).items()}


@pytest.mark.parametrize("make", [lambda: ViT(3), lambda: mlp(4, 4, 4, 4), Perceptron, ResNet])
def test_frozen_teacher_defined_last_shifts_nothing(make: type[nn.Module]) -> None:
    student = make()
    module = Net(student=student, teacher=copy.deepcopy(student))
    rest, dropped = pruned(module, "student")
    assert dropped == ["teacher"]
    assert parameter_depths(rest) == own_depths("student", student)


def test_frozen_loss_network_without_a_telling_name() -> None:
    for loss in (mlp(4, 4, 4, 4), ViT(12), ResNet((2, 2, 2))):
        module = Net(generator=ResNet(head=False), vgg=loss)
        rest, dropped = pruned(module, "generator")
        assert dropped == ["vgg"]
        assert parameter_depths(rest) == own_depths("generator", module.generator)


@pytest.mark.parametrize("wrapper", ["model", "_orig_mod", "module"])
def test_wrappers_are_looked_through(wrapper: str) -> None:
    inner = Net(student=mlp(4, 4, 4), loss=mlp(4, 4, 4))
    module = Net(**{wrapper: Net(net=inner)})
    rest, dropped = pruned(module, f"{wrapper}.net.student")
    assert dropped == [f"{wrapper}.net.loss"]
    assert set(parameter_depths(rest).values()) == {0, 1}


def test_several_frozen_networks_go_in_order_of_definition() -> None:
    module = Net(net=mlp(4, 4, 4), vgg=mlp(4, 4, 4), scale=nn.Identity(), lpips=Perceptron())
    assert pruned(module, "net")[1] == ["vgg", "lpips"]


@pytest.mark.parametrize("head", [linear(), mlp(4, 4, 4)], ids=["one layer", "two layers"])
def test_frozen_head_stays(head: nn.Module) -> None:
    module = Net(backbone=ViT(2, False), head=head)
    network = layers_from_module(module)
    assert without_frozen_tail(network, names_below(module, "backbone")) == (network, [])


def test_frozen_end_of_a_network_stays_with_its_head() -> None:
    """As when only the first layers are tuned, against shifts in the input."""
    module = Net(model=ResNet((2, 2, 2)))
    for trained in ("model.conv1", "model.layer1", "model.layer2"):
        assert pruned(module, trained)[1] == []


def test_frozen_beginning_stays() -> None:
    module = Net(backbone=ResNet(head=False), neck=mlp(4, 4, 4), decoder=mlp(4, 4, 4))
    assert pruned(module, "decoder")[1] == []
    assert pruned(module, "neck", "decoder")[1] == []


def test_elements_of_a_list_follow_one_another() -> None:
    module = nn.Sequential(mlp(4, 4, 4), mlp(4, 4, 4), mlp(4, 4, 4))
    assert pruned(module, "0.", "1.")[1] == []


@pytest.mark.parametrize(
    "name", ["teacher", "target_encoder", "encoder_momentum", "ema", "ema_model", "reference"]
)
def test_frozen_copy_goes_wherever_it_stands(name: str) -> None:
    online = ViT(2, False)
    parts = {"online": online, name: copy.deepcopy(online), "predictor": mlp(4, 4, 4)}
    rest, dropped = pruned(Net(**parts), "online", "predictor")
    assert dropped == [name]
    parts.pop(name)
    assert parameter_depths(rest) == depths_of(Net(**parts))
    first = Net(**{name: copy.deepcopy(online)}, online=online)
    assert pruned(first, "online")[1] == [name]


def test_copy_that_is_trained_stays() -> None:
    module = Net(student=mlp(4, 4, 4), teacher=mlp(4, 4, 4), out=linear())
    assert pruned(module, "student", "teacher.2", "out")[1] == []


def test_one_frozen_layer_with_the_name_of_a_copy_stays() -> None:
    module = Net(student=mlp(4, 4, 4), target=linear(), out=linear())
    assert pruned(module, "student", "out")[1] == []


def test_one_trained_parameter_makes_a_network_trained() -> None:
    module = Net(a=mlp(4, 4, 4), b=mlp(4, 4, 4))
    assert pruned(module, "a", "b.0.bias")[1] == []


@pytest.mark.parametrize("trained", [[], ["elsewhere.weight"], ["prompts"]])
def test_where_no_child_is_trained_nothing_goes(trained: list[str]) -> None:
    network = layers_from_module(Net(prompts=bare(), a=mlp(4, 4, 4), teacher=mlp(4, 4, 4)))
    assert without_frozen_tail(network, trained) == (network, [])


@pytest.mark.parametrize("head", [linear(), mlp(4, 4, 4)], ids=["one layer", "two layers"])
def test_what_a_trained_head_may_stand_on_stays(head: nn.Module) -> None:
    assert pruned(Net(classifier=head, vit=ViT(2, False)), "classifier")[1] == []


def test_frozen_backbone_stays_wherever_defined() -> None:
    """It is unfrozen later on, by `BackboneFinetuning`."""
    assert pruned(Net(neck=mlp(4, 4, 4), backbone=ResNet(head=False)), "neck")[1] == []


def test_names_may_be_any_collection() -> None:
    network = layers_from_names(["a.x.w", "a.y.w", "b.x.w", "b.y.w"])
    trained: Iterable[str] = ["a.x.w", "a.y.w"]
    for collection in (list(trained), set(trained), tuple(trained), dict.fromkeys(trained)):
        assert without_frozen_tail(network, collection)[1] == ["b"]


def test_teacher_defined_first_leaves_the_student_its_rates() -> None:
    student = ViT(2)
    own = layerwise_multipliers(layers_from_module(student), 0.5)
    module = Net(big=ViT(5), student=student)  # neither dropped nor named as a copy
    rest, dropped = pruned(module, "student")
    assert dropped == []
    factors = layerwise_multipliers(rest, 0.5)
    assert {name: factors[f"student.{name}"] for name in own} == own


def test_each_network_of_a_gan_has_its_own_depths() -> None:
    gan = Net(generator=mlp(4, 4, 4, 4), discriminator=ResNet((1, 1)))
    network = layers_from_module(gan)
    for name in ("generator", "discriminator"):
        part = smallest_holding(network, names_below(gan, name))
        assert part.name == name
        assert parameter_depths(part) == own_depths(name, getattr(gan, name))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.b.c.w"], "a.b.c"),
        (["a.b.c.w", "a.b.d.w"], "a.b"),
        (["a.b.c.w", "a.e.w"], "a"),
        (["a.b.c.w", "f.w"], ""),
        (["g"], ""),
        (["a.b.own"], "a.b"),
        (["a.b.own", "a.b.c.w"], "a.b"),
    ],
)
def test_smallest_part(names: list[str], expected: str) -> None:
    network = layers_from_names(["g", "a.b.own", "a.b.c.w", "a.b.d.w", "a.e.w", "f.w"])
    part = smallest_holding(network, names)
    assert part.name == expected
    assert part in set(network.walk())
    assert set(names) <= {parameter.name for parameter in part.all_parameters()}


def test_two_generators_and_two_critics() -> None:
    """CycleGAN: one optimizer for both generators, one for both critics."""
    parts = {name: ResNet((2, 2), head=False) for name in ("g_ab", "g_ba", "d_a", "d_b")}
    module = Net(**parts)
    optimizers = [names_below(module, which) for which in ("g_", "d_")]
    for part, names in zip(
        networks_of(layers_from_module(module), optimizers), optimizers, strict=True
    ):
        assert {parameter.name for parameter in part.all_parameters()} == names
        assert max(layerwise_multipliers(part, 0.5).values()) == 1.0


@pytest.mark.parametrize("frozen", ["first", "out"])
def test_freezing_a_single_layer_of_a_generator_shifts_no_other(frozen: str) -> None:
    names = ["g.first.w", "g.body.a.w", "g.body.b.w", "g.out.w", "d.a.w", "d.b.w"]
    optimizers = [[n for n in names if n.startswith(which)] for which in ("g", "d")]
    whole, _ = networks_of(layers_from_names(names), optimizers)
    optimizers[0].remove(f"g.{frozen}.w")
    partly, critic = networks_of(layers_from_names(names), optimizers)
    assert whole.name == partly.name == "g"
    assert critic.name == "d"
    assert parameter_depths(whole) == parameter_depths(partly)


@pytest.mark.parametrize(
    "optimizers",
    [
        [["stem.w", "body.a.w"], ["body.b.w", "head.w"]],
        [["stem.w", "head.w"], ["body.a.w", "body.b.w"]],
        [["body.a.w", "body.b.w"], ["head.w"]],
        [["stem.w"], ["body.a.w", "body.b.w", "head.w"]],
    ],
    ids=["share a part", "around the other's", "head", "stem"],
)
def test_optimizers_of_one_network_count_the_whole(optimizers: list[list[str]]) -> None:
    network = layers_from_names(["stem.w", "body.a.w", "body.b.w", "head.w"])
    assert networks_of(network, optimizers) == [network, network]


@pytest.mark.parametrize(
    "others", [["embed.w"], ["head.w"], ["head.a.w", "head.b.w"], ["net.a.w", "net.b.w", "out.w"]]
)
def test_single_layers_and_heads_beside_it_belong_to_the_network(others: list[str]) -> None:
    network = layers_from_names([*others, "stem.w", "body.a.w", "body.b.w"])
    assert smallest_holding(network, ["stem.w", "body.a.w"]) is network


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "names is empty; pass the name of at least one parameter"),
        (["a.w", "z.w"], r"names holds 'z.w', which is no parameter .* as in \['a.w', 'b.w'\]"),
        (["a"], "names holds 'a', which is no parameter of the network; pass full names"),
    ],
)
def test_wrong_names(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        smallest_holding(layers_from_names(["a.w", "b.w"]), names)
