"""Judging: stops, improvements and calibration against what they should be."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.early_stopping import stopping_epoch
from strategies.early_stopping.network import network_of
from strategies.early_stopping.train.curves import LearningCurve
from strategies.early_stopping.train.evaluate import (
    Seen,
    first_stops,
    improvements,
    platt,
    weights_of,
)
from strategies.early_stopping.train.replay import Replay, patience_stops
from tests.strategies.early_stopping.curves import overfitting

CURVES = [LearningCurve(-overfitting(60, 10 + 4 * i, i), None, "made", str(i)) for i in range(6)]


@pytest.mark.parametrize("preset", ["safe", "balanced", "fast"])
def test_what_is_judged_is_what_the_rule_does(preset: str) -> None:
    price = network_of().prices[preset]
    flat = LearningCurve(np.array([0.0, 0.5] + [1.0] * 58), None, "made", "flat")
    late = LearningCurve(np.repeat([0.1, 0.4, 0.5], [40, 5, 15]), None, "made", "late")
    for curve in [*CURVES, flat, late]:
        seen = Seen.of(network_of(), curve, train=False)
        stop = stopping_epoch(curve.values, "max", 60, preset) or 60
        assert abs(seen.stops_at(price) - stop) <= 1  # prices between those tried are interpolated


def test_improvements_by_hand() -> None:
    curve = LearningCurve(np.array([0.0, 2.0, 1.0, 3.0]), None, "made", "one")
    np.testing.assert_allclose(improvements(curve, np.array([2, 3, 4])), [0.5, 0.5, 0.0])


def test_first_stops() -> None:
    stop = np.array([[False, True, True], [False, False, False], [True, False, False]])
    np.testing.assert_array_equal(first_stops(stop, np.array([3, 4, 5]), 6), [4, 6, 3])


def test_replay_by_hand() -> None:
    values = np.array([0.0, 6.0, 7.0, 6.0, 5.0, 8.0, 10.0, 9.0, 9.0, 9.0])
    curve = LearningCurve(values, None, "made", "one")
    found = Replay.of([curve], [4])
    assert found.saved == pytest.approx([0.6])
    assert found.regret == pytest.approx([0.3])
    assert found.late_regret == pytest.approx([0.3])
    late = LearningCurve(np.repeat(values, 3), None, "made", "one")
    assert Replay.of([late], [12]).late_regret == pytest.approx([3 / 10])
    assert Replay.of([LearningCurve(values[1:], None, "made", "one")], [3]).regret == 3 / 5


def test_patience_is_that_of_lightning() -> None:
    import torch
    from lightning.pytorch.callbacks import EarlyStopping

    for curve in CURVES:
        peer = EarlyStopping("x", patience=5, mode="max")
        made = len(curve)
        for done, value in enumerate(curve.values, start=1):
            if peer._evaluate_stopping_criteria(torch.tensor(value))[0]:
                made = done
                break
        assert patience_stops([curve], 5)[0] == made


@pytest.mark.parametrize(("slope", "shift"), [(1.0, 0.0), (0.6, -0.5), (1.5, 1.0)])
def test_a_known_miscalibration_is_found(slope: float, shift: float) -> None:
    random = np.random.default_rng(0)
    odds = random.normal(scale=2, size=40_000)
    happened = random.uniform(size=len(odds)) < 1 / (1 + np.exp(-slope * odds - shift))
    found = platt(1 / (1 + np.exp(-odds)), happened)
    np.testing.assert_allclose(found, (slope, shift), atol=0.05)


def test_little_data_changes_little() -> None:
    assert platt(np.full(3, 0.9), np.zeros(3, bool)) == pytest.approx((0.7, -0.2), abs=0.3)


def test_calibrated_chances_keep_their_sum_and_order() -> None:
    network = network_of().settled(network_of().prices, (0.5, -1.0))
    chances = np.array([[0.2, 0.5, 0.3], [0.9, 0.05, 0.05]])
    found = network.calibrated(chances)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    odds = 0.5 * np.log(0.8 / 0.2) - 1
    assert 1 - found[0, 0] == pytest.approx(1 / (1 + np.exp(-odds)))
    assert found[0, 1] / found[0, 2] == pytest.approx(5 / 3)


def test_weights_grow_with_the_root_of_the_group() -> None:
    curves = [LearningCurve(np.arange(9.0), None, "made", g) for g in "aaaab"]
    weights = weights_of(curves)
    assert weights[:4].sum() == pytest.approx(2 * weights[4])
