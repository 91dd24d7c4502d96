"""The cost against brute force, the network against its twin in torch, and that training works."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from strategies.early_stopping.forecast import View
from strategies.early_stopping.network import Network, standardised
from strategies.early_stopping.train import fit as module
from strategies.early_stopping.train.batches import Batches
from strategies.early_stopping.train.curves import LearningCurve
from strategies.early_stopping.train.evaluate import PRICES, REGRETS, Seen, preset_prices
from strategies.early_stopping.train.fit import Recipe, fit
from strategies.early_stopping.train.replay import Replay
from strategies.early_stopping.train.rows import names, rows_of


def plateaus(count: int, seed: int = 0) -> list[LearningCurve]:
    """Curves that rise for a while, which is different for each, and then never again."""
    random = np.random.default_rng(seed)
    curves = []
    for i in range(count):
        turn, n = random.integers(8, 30), 60
        rise = np.minimum(np.arange(n), turn) / turn
        noise = 0.03 * random.normal(size=n)
        values = np.where(np.arange(n) <= turn, rise, 0.9 + noise.clip(-0.1, 0.05))
        curves.append(LearningCurve(values, None, "made", f"group {i % 20}"))
    return curves


def test_the_cost_is_what_stopping_costs_on_average() -> None:
    random = np.random.default_rng(0)
    odds, regret = random.normal(size=(2, 3, 4)), random.uniform(0, 1.5, size=(3, 4))
    spent, price = np.sort(random.uniform(size=(3, 4))), random.uniform(0.01, 0.4, size=3)
    chance = 1 / (1 + np.exp(-odds))
    expected = 0.0
    for m, c in itertools.product(range(2), range(3)):
        going, cost = 1.0, 0.0
        for t in range(4):
            cost += going * chance[m, c, t] * (min(regret[c, t], 1) + price[c] * spent[c, t])
            going *= 1 - chance[m, c, t]
        expected += (cost + going * price[c]) / (price[c] + 0.01) / 6
    found = module._cost(*(torch.from_numpy(a) for a in (odds, regret, spent, price)))
    assert found.item() == pytest.approx(expected)


@pytest.fixture(scope="module")
def trained() -> Network:
    rows = [rows_of(curve) for curve in plateaus(200)]
    return fit(rows, np.ones(200), Recipe(members=2, width=32, stop_width=16, steps=250))


def test_numpy_computes_what_torch_trained(trained: Network) -> None:
    columns = names()
    stream = Batches([rows_of(plateaus(1)[0])], np.ones(1), columns, np.random.default_rng(0))
    batch = next(stream)
    x, price = batch.x[batch.used], np.full(int(batch.used.sum()), 0.05)
    w = {k: torch.from_numpy(v).double() for k, v in trained._w.items()}
    scaled = standardised(x, trained._w["center"], trained._w["scale"])
    still = Recipe(members=2, dropout=0.0, input_dropout=0.0)
    outputs, odds = module._forward(w, torch.from_numpy(scaled), torch.from_numpy(price), still)
    seen = trained({name: x[:, i] for i, name in enumerate(trained.names)})
    chances = torch.softmax(outputs[..., :-1], dim=-1).numpy()
    np.testing.assert_allclose(seen.probabilities, chances, rtol=1e-6)
    found = trained.stopping(seen, np.array([0.05]))[:, 0]
    np.testing.assert_allclose(found, odds.numpy(), rtol=1e-6)


def test_it_learns_to_stop_soon_after_the_plateau_begins(trained: Network) -> None:
    unseen = plateaus(50, seed=1)
    seen = [Seen.of(trained, curve, train=False) for curve in unseen]
    stops = np.array([s.stops_at(0.05) for s in seen])
    first_best = np.array([int(np.argmax(c.values >= 1.0)) + 1 for c in unseen])
    assert (stops - first_best).mean() < 8  # of 60 evaluations
    regret = [c.best[-1] - c.best[stop - 1] for c, stop in zip(unseen, stops, strict=True)]
    assert np.mean(regret) < 0.02


def test_presets_give_up_what_they_are_meant_to(trained: Network) -> None:
    seen = [Seen.of(trained, curve, train=False) for curve in plateaus(100, seed=2)]
    curves = [s.curve for s in seen]
    for preset, price in preset_prices(seen).items():
        regret = Replay.of(curves, [s.stops_at(price) for s in seen]).regret.mean()
        assert regret <= REGRETS[preset] + 0.001
        assert price > PRICES[0]


def test_the_same_seed_trains_the_same_network() -> None:
    rows = [rows_of(curve) for curve in plateaus(20)]
    recipe = Recipe(members=1, width=8, stop_width=4, steps=5)
    a, b, c = (fit(rows, np.ones(20), r) for r in (recipe, recipe, Recipe(1, 8, 4, 5, seed=1)))
    curve = plateaus(1)[0]
    at, budget = np.arange(1, 61), np.full(60, 60.0)
    views = [
        View.of(network, curve.values, None, at, budget).probabilities for network in (a, b, c)
    ]
    np.testing.assert_array_equal(views[0], views[1])
    assert (views[0] != views[2]).any()
