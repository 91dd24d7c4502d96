"""What holds for every network, found by random search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.learning_rate import (
    Layer,
    Parameter,
    layers_from_names,
    layerwise_multipliers,
    parameter_depths,
)

PARTS = [
    *("a", "b", "conv", "norm", "bn1", "blocks", "layers", "0", "1", "2", "10", "head", "fc"),
    *("classifier", "embed", "stem", "cls_token", "attn", "mlp", "experts", "_orig_mod", "lora_A"),
    *("lora_B", "parametrizations", "downsample", "weight", "bias"),
]
# Machines differ in speed, and a run leaves no files behind.
search = settings(deadline=None, database=None, max_examples=50)
DECAYS = st.floats(0.05, 1.0)


@st.composite
def any_names(draw: st.DrawFn) -> list[str]:
    """Any names at all, many of them spelled as something that the rule knows."""
    name = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map(".".join)
    return draw(st.lists(name, min_size=1, max_size=30, unique=True))


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Names of a backbone and of its head, in the order of the computation."""
    inner = [f"part_{i}" for i in range(draw(st.integers(2, 4)))]
    backbone = draw(st.sampled_from([[], ["embed.weight"], ["stem.weight", "stem_norm.bias"]]))
    for index, blocks in enumerate(draw(st.lists(st.integers(2, 4), min_size=0, max_size=3))):
        names = [f"stage_{index}.{i}.{part}" for i in range(blocks) for part in inner]
        backbone = [*backbone, *(f"{name}.{kind}" for name in names for kind in ("weight", "bias"))]
    if not backbone or draw(st.booleans()):
        backbone = [*backbone, "last_a.weight", "last_b.weight"]
    return [f"backbone.{name}" for name in backbone], ["head.weight", "head.bias"]


def depths_of(names: list[str]) -> dict[str, int]:
    return parameter_depths(layers_from_names(names))


@search
@given(any_names(), DECAYS)
def test_factors_are_in_range_and_a_decay_apart(names: list[str], decay: float) -> None:
    factors = layerwise_multipliers(names, decay)
    assert set(factors) == set(names)
    assert all(0 < factor <= 1 for factor in factors.values())
    assert max(factors.values()) == 1
    depths = depths_of(names)
    by_depth = {depth: factors[name] for name, depth in depths.items()}
    assert sorted(by_depth) == list(range(len(by_depth)))
    for depth in range(1, len(by_depth)):
        assert by_depth[depth - 1] / by_depth[depth] == pytest.approx(decay, rel=1e-12)


@search
@given(any_names())
def test_same_names_give_the_same_tree_and_depths(names: list[str]) -> None:
    def plain(layer: Layer) -> tuple[object, ...]:
        return (layer.name, layer.kind, layer.role, layer.parameters, *map(plain, layer.children))

    assert plain(layers_from_names(names)) == plain(layers_from_names(iter(names)))
    assert depths_of(names) == depths_of(list(names))


@search
@given(any_names(), st.sampled_from(["model.", "net.backbone.", "module._orig_mod.", "0."]))
def test_prefix_changes_nothing(names: list[str], prefix: str) -> None:
    prefixed = depths_of([f"{prefix}{name}" for name in names])
    assert prefixed == {f"{prefix}{name}": depth for name, depth in depths_of(names).items()}


@search
@given(any_names())
def test_wrapping_changes_nothing(names: list[str]) -> None:
    network = layers_from_names(names)
    for role in ("layer", "list"):
        wrapped = Layer("", "Wrapper", role, children=(replace(network, name="model"),))
        assert parameter_depths(wrapped) == parameter_depths(network)


@search
@given(any_names())
def test_separator_changes_nothing(names: list[str]) -> None:
    slashed = depths_of([name.replace(".", "/") for name in names])
    assert slashed == {name.replace(".", "/"): depth for name, depth in depths_of(names).items()}


@search
@given(networks())
def test_head_may_come_first_and_is_alone_on_top(parts: tuple[list[str], list[str]]) -> None:
    backbone, head = parts
    depths = depths_of([*backbone, *head])
    assert depths == depths_of([*head, *backbone])
    assert depths["head.weight"] == depths["head.bias"] == max(depths.values())
    assert depths[backbone[0]] == 0


@search
@given(networks())
def test_depth_never_falls_from_input_to_output(parts: tuple[list[str], list[str]]) -> None:
    backbone, head = parts
    depths = [depths_of([*backbone, *head])[name] for name in [*backbone, *head]]
    assert depths == sorted(depths)


@search
@given(networks())
def test_blocks_each_have_one_level(parts: tuple[list[str], list[str]]) -> None:
    depths = depths_of([*parts[0], *parts[1]])
    blocks: dict[str, set[int]] = {}
    for name, depth in depths.items():
        if "stage_" in name:
            blocks.setdefault(".".join(name.split(".")[:3]), set()).add(depth)
    assert all(len(found) == 1 for found in blocks.values())
    levels = [next(iter(found)) for found in blocks.values()]
    lowest = min(levels, default=0)
    assert levels == list(range(lowest, lowest + len(levels)))


@search
@given(any_names(), st.lists(st.integers(0, 3), min_size=30, max_size=30))
def test_shared_parameters_count_at_their_deepest_use(names: list[str], keys: list[int]) -> None:
    network = layers_from_names(names)
    key_of = dict(zip(names, keys, strict=False))

    def shared(layer: Layer) -> Layer:
        parameters = tuple(Parameter(p.name, key_of[p.name]) for p in layer.parameters)
        return replace(layer, parameters=parameters, children=tuple(map(shared, layer.children)))

    alone = parameter_depths(network)
    deepest = {
        key: max(alone[name] for name in names if key_of[name] == key) for key in key_of.values()
    }
    assert parameter_depths(shared(network)) == {name: deepest[key_of[name]] for name in names}


@search
@given(any_names(), st.data())
def test_depth_is_what_a_callable_says(names: list[str], data: st.DataObject) -> None:
    wanted = {name: data.draw(st.integers(0, 50)) for name in names}
    assert parameter_depths(layers_from_names(names), groups=wanted.__getitem__) == wanted
