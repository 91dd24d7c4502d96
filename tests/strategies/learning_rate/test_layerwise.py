"""The rule that turns depths into factors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from strategies.learning_rate import (
    Layer,
    LayerwiseDecay,
    Parameter,
    layers_from_names,
    layerwise_multipliers,
)
from tests.strategies.learning_rate.name_lists import torchvision_resnet

NAMES = ["stem.weight", "a.weight", "a.bias", "b.weight", "fc.weight"]


def test_rate_is_base_times_decay_to_the_distance_from_the_head() -> None:
    assert layerwise_multipliers(NAMES, decay=0.5) == {
        "stem.weight": 0.125, "a.weight": 0.25, "a.bias": 0.25, "b.weight": 0.5, "fc.weight": 1.0
    }  # fmt: skip


def test_default_decay_is_that_of_mae() -> None:
    assert layerwise_multipliers(NAMES)["stem.weight"] == 0.75**3


def test_names_and_tree_give_the_same() -> None:
    names = torchvision_resnet((2, 2), 2)
    assert layerwise_multipliers(names) == layerwise_multipliers(layers_from_names(names))
    assert layerwise_multipliers(name for name in names) == layerwise_multipliers(names)


@pytest.mark.parametrize("decay", [1, 1.0, np.float64(0.5), np.float32(0.5), 1e-3])
def test_any_real_number_is_a_decay(decay: Any) -> None:
    factors = layerwise_multipliers(NAMES, decay)
    assert list(factors.values()) == [float(decay) ** d for d in (3, 2, 2, 1, 0)]
    assert all(type(factor) is float for factor in factors.values())


def test_factors_stay_above_zero_in_very_deep_networks() -> None:
    factors = layerwise_multipliers([f"l{i}.weight" for i in range(1000)], decay=0.1)
    assert 0 < min(factors.values()) < 1e-300


@pytest.mark.parametrize(
    ("decay", "error", "message"),
    [
        (0, ValueError, r"^decay=0 must be in \(0, 1\]; pass 1.0 for equal rates"),
        (-0.5, ValueError, r"^decay=-0.5 must be in"),
        (1.5, ValueError, r"^decay=1.5 must be in"),
        (float("nan"), ValueError, r"^decay=nan must be in"),
        (float("inf"), ValueError, r"^decay=inf must be in"),
        ("0.5", TypeError, r"^decay='0.5' must be a number in \(0, 1\], such as 0.75"),
        (None, TypeError, r"^decay=None must be a number"),
        (True, TypeError, r"^decay=True must be a number"),
        (1j, TypeError, r"^decay=1j must be a number"),
    ],
)
def test_wrong_decay(decay: Any, error: type[Exception], message: str) -> None:
    for make in (lambda: LayerwiseDecay(decay), lambda: layerwise_multipliers(NAMES, decay)):
        with pytest.raises(error, match=message):
            make()


def test_wrong_switch() -> None:
    with pytest.raises(TypeError, match=r"^no_decay_on_bias_and_norm=1 must be a bool"):
        LayerwiseDecay(no_decay_on_bias_and_norm=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("network", ["stem.weight", b"stem", 3, None])
def test_wrong_network(network: Any) -> None:
    with pytest.raises(TypeError, match=r"^names=.* must be a list of parameter names"):
        layerwise_multipliers(network)


def test_decision_tells_depths_levels_and_reason() -> None:
    rates = LayerwiseDecay(0.5).decide(NAMES)
    assert list(rates.depths.values()) == [0, 1, 1, 2, 3]
    assert rates.levels == {0: 0.125, 1: 0.25, 2: 0.5, 3: 1.0}
    assert list(rates.levels) == [0, 1, 2, 3]
    assert rates.reason == "4 levels from stem.weight (x0.125) to fc.weight (x1)"
    assert rates.no_weight_decay == frozenset()


def test_one_level_is_told_in_the_singular() -> None:
    assert LayerwiseDecay(0.5).decide(["w"]).reason == "1 level from w (x1) to w (x1)"


def test_levels_are_in_order_where_the_head_comes_first() -> None:
    rates = LayerwiseDecay(0.5).decide(["head.w", "stem.w", "body.w"])
    assert list(rates.levels.items()) == [(0, 0.25), (1, 0.5), (2, 1.0)]


def test_weight_decay_leaves_biases_and_norms_alone() -> None:
    names = torchvision_resnet((2,), 2)
    fixed = LayerwiseDecay(no_decay_on_bias_and_norm=True).decide(names).no_weight_decay
    expected = {n for n in names if ".bn" in n or n.startswith("bn") or n == "fc.bias"}
    assert fixed == expected


def test_norms_are_known_by_their_role() -> None:
    gain, shift = Parameter("1.weight"), Parameter("1.bias", is_bias=True)
    norm = Layer("1", "BatchNorm1d", "norm", (gain, shift))
    bias = Parameter("0.b", is_bias=True)
    dense = Layer("0", "Dense", parameters=(Parameter("0.w"), bias))
    rates = LayerwiseDecay(no_decay_on_bias_and_norm=True).decide(
        Layer("", "Sequential", "list", children=(dense, norm))
    )
    assert rates.no_weight_decay == {"0.b", "1.weight", "1.bias"}


def _depth(name: str) -> int:
    return len(name)


def test_rule_is_a_value() -> None:
    rule = LayerwiseDecay(0.5, ["stem"], True)
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == rule
    assert (
        repr(rule) == "LayerwiseDecay(decay=0.5, groups=['stem'], no_decay_on_bias_and_norm=True)"
    )
