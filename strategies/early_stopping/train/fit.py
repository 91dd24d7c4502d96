"""Training of the network: it learns to forecast, and to stop where that costs least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.early_stopping.features import budget_features
from strategies.early_stopping.history import Array
from strategies.early_stopping.network import Network, standardised
from strategies.early_stopping.train.batches import Batch, Batches
from strategies.early_stopping.train.rows import NEEDED, Rows, names

EDGES = np.geomspace(1e-3, 3, 13)
_LEAST_SPREAD = 0.05


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Args:
        members: Networks in the ensemble; they see the same batches and differ in how they began
            and in what was dropped.
        width: Units of the two hidden layers.
        stop_width: Hidden units of the stopping output.
        steps: Optimizer steps.
        rate: Highest learning rate, of a one-cycle schedule.
        decay: Weight decay.
        dropout: Of hidden units.
        input_dropout: Of features.
        forecast: Weight of the forecast next to the cost of stopping.
        late: Weight of the regret against the range after the first tenth of the curve. The range
            from the start flatters rules that stop early on curves with a huge first drop.
        seed: Of all chance.
    """

    members: int = 4
    width: int = 64
    stop_width: int = 32
    steps: int = 1000
    rate: float = 3e-3
    decay: float = 0.02
    dropout: float = 0.1
    input_dropout: float = 0.05
    forecast: float = 0.3
    late: float = 0.03
    seed: int = 0


def fit(
    rows: Sequence[Rows],
    weights: Array,
    recipe: Recipe = Recipe(),
    report: Callable[[int, float], None] | None = None,
) -> Network:
    """Train a network on curves.

    The expected cost of a curve is what stopping loses, plus the price of the evaluations made.
    With the chance to stop at each moment given by the network, it is a smooth function of the
    weights, so stopping is learnt directly, not by way of a forecast.

    Args:
        rows: Curves.
        weights: How often each is drawn.
        recipe: How to train.
        report: Called now and then with the step and the loss.
    """
    import torch

    torch.manual_seed(recipe.seed)
    random = np.random.default_rng(recipe.seed)
    columns = names()
    scaling = _scaling(rows, weights, columns, random)
    batches = Batches(rows, weights, columns, random)
    parameters = _parameters(recipe, len(scaling["center"]))
    optimizer = torch.optim.AdamW(parameters.values(), recipe.rate, weight_decay=recipe.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, recipe.steps)
    for step in range(recipe.steps):
        loss = _loss(parameters, next(batches), scaling, recipe)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        schedule.step()
        if report is not None and step % 100 == 0:
            report(step, loss.item() / recipe.members)
    middles = np.concatenate([[0.0], np.sqrt(EDGES[1:] * EDGES[:-1]), EDGES[-1:]])
    unset: dict[str, NDArray[Any]] = {
        "presets": np.array([], "U8"),
        "prices": np.array([]),
        "calibration": np.array([1.0, 0.0]),
    }
    arrays = {name: tensor.detach().numpy() for name, tensor in parameters.items()}
    return Network(unset | {"edges": EDGES, "middles": middles} | scaling | arrays)


def _parameters(recipe: Recipe, features: int) -> dict[str, Any]:
    import torch

    members, h, s = recipe.members, recipe.width, recipe.stop_width
    shapes = {
        "1": (features, h), "2": (h, h), "f": (h, len(EDGES) + 2),
        "p": (1, h), "3": (h, s), "s": (s, 1),
    }  # fmt: skip
    parameters = {}
    for name, (fan_in, out) in shapes.items():
        weight = torch.empty(members, fan_in, out).uniform_(-1, 1) / fan_in**0.5
        parameters[f"w{name}"] = weight.requires_grad_()
        parameters[f"b{name}"] = torch.zeros(members, 1, out).requires_grad_()
    with torch.no_grad():
        parameters["bs"] -= 2.0  # to begin with, seldom stop
    return parameters


def _scaling(
    rows: Sequence[Rows], weights: Array, columns: list[str], random: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Centre and scale of each feature, and how far apart from each other curves usually are."""
    stream = Batches(rows, weights, columns, random, curves=min(4 * len(rows), 4000), moments=12)
    batch = next(stream)
    x = batch.x[batch.used]
    early, center, late = np.nanquantile(x, [0.05, 0.5, 0.95], axis=0)
    scale = np.maximum((late - early) / 3.3, 0.02)
    z = standardised(x, center, scale)
    mean = z.mean(axis=0)
    # Mahalanobis distance; directions in which curves hardly differ count for less.
    spread, directions = np.linalg.eigh(np.cov(z.T))
    whitening = directions / np.sqrt(np.maximum(spread, 0) + _LEAST_SPREAD)
    distance = np.sqrt(np.mean(((z - mean) @ whitening) ** 2, axis=1))
    extra = budget_features({name: np.ones(1) for name in NEEDED}, np.ones(1, int), np.ones(1))
    single = {
        "center": center, "scale": scale, "mean": mean, "whitening": whitening,
        "farthest": np.quantile(distance, 0.99),
    }  # fmt: skip
    names = {"names": np.array([*columns, *extra])}
    return names | {name: np.asarray(values, np.float32) for name, values in single.items()}


def _loss(
    parameters: dict[str, Any], batch: Batch, scaling: dict[str, NDArray[Any]], recipe: Recipe
) -> Any:
    """Cost of stopping and log-loss of the forecast, summed over the members."""
    import torch
    from torch.nn import functional

    x = torch.from_numpy(standardised(batch.x, scaling["center"], scaling["scale"])).float()
    used, price = torch.from_numpy(batch.used), torch.from_numpy(batch.price)
    curves, moments, _ = x.shape
    outputs, odds = _forward(parameters, x.flatten(0, 1), price.repeat_interleave(moments), recipe)
    odds = odds.view(-1, curves, moments).masked_fill(~used, -30.0)
    regret = (1 - recipe.late) * batch.regret + recipe.late * batch.late_regret
    cost = _cost(odds, torch.from_numpy(regret), torch.from_numpy(batch.spent), price)
    flat = used.flatten()
    real = outputs[:, flat]
    bins = torch.from_numpy(np.searchsorted(EDGES, batch.gain)).flatten()[flat]
    target = bins.expand(recipe.members, -1)
    log_loss = functional.cross_entropy(real[..., :-1].transpose(1, 2), target)
    place = torch.from_numpy(batch.place).flatten()[flat].expand(recipe.members, -1)
    comes = torch.isfinite(place)
    when = functional.binary_cross_entropy_with_logits(real[..., -1][comes], place[comes])
    return recipe.members * (cost + recipe.forecast * (log_loss + 0.2 * when))


def _forward(w: dict[str, Any], x: Any, price: Any, recipe: Recipe) -> tuple[Any, Any]:
    """The network as `Network` computes it, with dropout."""
    from torch.nn import functional

    x = functional.dropout(x.expand(recipe.members, -1, -1), recipe.input_dropout)
    hidden = functional.silu((x @ w["w1"]) + w["b1"])
    hidden = functional.silu(functional.dropout(hidden, recipe.dropout) @ w["w2"] + w["b2"])
    hidden = functional.dropout(hidden, recipe.dropout)
    shifted = hidden + (price.log()[:, None] + 3) * w["wp"] + w["bp"]
    turned = functional.silu(shifted @ w["w3"] + w["b3"])
    return hidden @ w["wf"] + w["bf"], (turned @ w["ws"] + w["bs"])[..., 0]


def _cost(odds: Any, regret: Any, spent: Any, price: Any) -> Any:
    """Expected regret and price of the evaluations, when stopping with these log-odds.

    Args:
        odds: By member, curve and moment.
        regret: By curve and moment.
        spent: By curve and moment.
        price: By curve.
    """
    from torch.nn import functional

    go_on = functional.logsigmoid(-odds).cumsum(-1)
    reach = functional.pad(go_on[..., :-1], (1, 0))
    stop = (reach + functional.logsigmoid(odds)).exp()
    each = regret.clamp(max=1.0) + price[:, None] * spent
    cost = (stop * each).sum(-1) + go_on[..., -1].exp() * price
    return (cost / (price + 0.01)).mean()
