"""Levels that the user gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strategies.learning_rate import (
    Groups,
    Layer,
    LayerwiseDecay,
    Parameter,
    layers_from_names,
    layerwise_multipliers,
    parameter_depths,
)
from tests.strategies.learning_rate.name_lists import timm_vit

NAMES = [
    "embed.w",
    *(f"blocks.{i}.{part}.w" for i in range(12) for part in "ab"),
    "norm.w",
    "out.w",
]


def depths_of(groups: Groups, names: list[str] = NAMES) -> dict[str, int]:
    return parameter_depths(layers_from_names(names), groups)


def test_pattern_i_claims_depth_i_and_the_rest_is_one_above() -> None:
    depths = depths_of(["embed", "blocks.0", "blocks.7"])
    assert depths["embed.w"] == 0
    assert depths["blocks.0.a.w"] == depths["blocks.0.b.w"] == 1
    assert depths["blocks.7.b.w"] == 2
    assert {
        d for name, d in depths.items() if name[:9] not in ("embed.w", "blocks.0.", "blocks.7.")
    } == {3}


def test_order_of_patterns_not_of_names_gives_the_depth() -> None:
    assert depths_of(["out", "norm", "embed", "blocks"]) == {
        name: ["out", "norm", "embed", "blocks"].index(name.split(".")[0]) for name in NAMES
    }


def test_layer_is_claimed_at_its_boundary() -> None:
    claimed = [name for name, depth in depths_of(["blocks.1"]).items() if depth == 0]
    assert claimed == ["blocks.1.a.w", "blocks.1.b.w"]


@pytest.mark.parametrize(
    ("pattern", "claimed"),
    [
        ("blocks.1*", [1, 10, 11]),
        ("blocks.?", range(10)),
        ("blocks.?.*", range(10)),
        ("blocks.[0-2]", [0, 1, 2]),
        ("blocks.1?.a.w", [10, 11]),
        ("*.b.w", range(12)),
        ("blocks", range(12)),
        ("blocks.*.a", range(12)),
        ("blocks.3.a.w", [3]),
    ],
)
def test_wildcards(pattern: str, claimed: Any) -> None:
    found = {int(n.split(".")[1]) for n, depth in depths_of([pattern]).items() if depth == 0}
    assert found == set(claimed)


def test_wildcards_heed_case_and_slashes_bound_layers_too() -> None:
    names = ["Dense/kernel", "dense/kernel", "dense_1/kernel"]
    assert list(depths_of(["dense"], names).values()) == [1, 0, 1]
    assert list(depths_of(["[Dd]ense"], names).values()) == [0, 0, 1]


def test_patterns_reproduce_the_structure() -> None:
    names = timm_vit(4)
    patterns = ["*_embed*", *(f"blocks.{i}" for i in range(4))]
    expected = layerwise_multipliers([n for n in names if "token" not in n], 0.5)
    actual = layerwise_multipliers(names, 0.5, groups=patterns)
    assert {name: actual[name] for name in expected} == expected
    assert actual["cls_token"] == 1.0  # no pattern claims it


@pytest.mark.parametrize("whole", [int, np.int64, np.uint8], ids=["int", "int64", "uint8"])
def test_callable_gives_depths(whole: type) -> None:
    depths = depths_of(lambda name: whole(5) if "blocks" in name else whole(0))
    assert depths["blocks.3.a.w"] == 5
    assert depths["out.w"] == 0
    assert all(type(depth) is int for depth in depths.values())


def test_gaps_between_depths_count() -> None:
    factors = layerwise_multipliers(["a.w", "b.w"], 0.5, groups=lambda n: {"a.w": 1, "b.w": 4}[n])
    assert factors == {"a.w": 0.5**3, "b.w": 1.0}


def test_shared_parameter_counts_at_the_deeper_of_two_groups() -> None:
    network = Layer("", "Net", parameters=tuple(Parameter(n, key=n in "ac") for n in "abc"))
    assert parameter_depths(network, ["a", "b", "c"]) == {"a": 2, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ("embed", TypeError, r"^groups='embed' must be a list of name patterns .* or a callable"),
        (b"embed", TypeError, r"^groups=b'embed' must be a list"),
        ({"embed": 0}, TypeError, r"^groups=\{'embed': 0\} must be a list"),
        ({"embed"}, TypeError, r"^groups=\{'embed'\} must be a list"),
        (3, TypeError, r"^groups=3 must be a list"),
        ([], ValueError, r"^groups=\[\] names no level; pass at least one pattern, or None"),
        (["embed", 1], TypeError, r"^groups\[1\]=1 must be a string: the name of a layer"),
        ([["embed"]], TypeError, r"^groups\[0\]=\['embed'\] must be a string"),
        (["embed", ""], ValueError, r"^groups\[1\]='' names no layer; pass the name"),
        (["embed", "block"], ValueError,
         r"^groups\[1\]='block' matches no parameter; .* such as 'embed.w' or 'out.w'"),
        (["Embed"], ValueError, r"^groups\[0\]='Embed' matches no parameter"),
        (["blocks", "embed", "blocks.0"], ValueError,
         r"^groups\[0\]='blocks' and groups\[2\]='blocks.0' both claim 'blocks.0.a.w'; make"),
        (["embed", "embed"], ValueError, r"both claim 'embed.w'; make the patterns disjoint"),
        (lambda name: 1.0, TypeError, r"^groups\('embed.w'\) returned 1.0; return .* whole number"),
        (lambda name: None, TypeError, r"^groups\('embed.w'\) returned None"),
        (lambda name: "1", TypeError, r"^groups\('embed.w'\) returned '1'"),
        (lambda name: True, TypeError, r"^groups\('embed.w'\) returned True"),
        (lambda name: np.float32(1), TypeError, r"^groups\('embed.w'\) returned"),
        (lambda name: -1, ValueError, r"^groups\('embed.w'\) returned -1; return a depth >= 0"),
        (lambda name: 10**400, ValueError, r"^groups\('embed.w'\) returned 1000.*at most 1000000"),
        (lambda name: np.array([1, 2]), TypeError, r"^groups\('embed.w'\) returned array"),
        (lambda name: np.int8(-2), ValueError, r"^groups\('embed.w'\) returned -2"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_its_value_and_the_cure(
    groups: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        depths_of(groups)


@pytest.mark.parametrize("groups", ["embed", [], ["embed", 1], [""], 3])
def test_what_is_wrong_on_every_network_is_told_at_once(groups: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^groups"):
        LayerwiseDecay(groups=groups)


def test_errors_of_the_callable_reach_the_user() -> None:
    with pytest.raises(KeyError, match="embed"):
        depths_of({}.__getitem__)
