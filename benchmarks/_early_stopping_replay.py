"""Finished curves replayed: the network, cross-validated by family, against what it replaces."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._early_stopping_frontier import Frontier, at_regret, calibration_error, over
from benchmarks._early_stopping_references import Reference, References
from strategies.early_stopping import PredictiveStopping, stopping_epoch
from strategies.early_stopping.train.curves import LearningCurve, read_bulk, read_table, usable
from strategies.early_stopping.train.evaluate import (
    NOTICEABLE,
    REGRETS,
    Seen,
    improvements,
    platt,
    preset_prices,
)
from strategies.early_stopping.train.fit import Recipe
from strategies.early_stopping.train.folds import folds
from strategies.early_stopping.train.replay import Replay, patience_stops
from strategies.early_stopping.train.trainer import SIMULATED, Trainer, simulated_curves

PATIENCES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 25, 30, 40, 60, 100, 200)
SHOWN = (3, 5, 10, 20, 30)
OURS = "network"


@dataclass(frozen=True)
class Plan:
    """How much to do.

    Args:
        simulated: Curves of our own runs to train on.
        sizes: Numbers of them to compare.
        recipe: How to train.
        every: Every how many-th collected curve to use.
        reference_batches: Batches that the references are trained on.
        keep: Folder in which simulated curves are kept, or None.
    """

    simulated: int = SIMULATED
    sizes: tuple[int, ...] = (0, 10_000, 20_000, 50_000)
    recipe: Recipe = field(default_factory=Recipe)
    every: int = 1
    reference_batches: int = 200
    keep: Path | None = None


QUICK = Plan(
    simulated=128, sizes=(0, 128), recipe=Recipe(members=1, steps=20), every=20, reference_batches=4
)


def measure(data: Path, plan: Plan) -> dict[str, Any]:
    """All figures of the part `replay`."""
    dev, others = collected(data, plan.every)
    made = simulated_curves(plan.simulated, keep=plan.keep)
    train = Trainer(plan.recipe, made)
    curves: list[LearningCurve] = []
    seen: list[Seen] = []
    told: list[Seen] = []
    references: dict[str, list[Reference]] = {}
    for i, fold in enumerate(folds(dev, others)):
        network = train(fold.train)
        reference = References(*train.rows_and_weights(fold.train), plan.reference_batches)
        for curve in fold.test:
            curves.append(curve)
            seen.append(Seen.of(network, curve, train=False, fold=i))
            told.append(Seen.of(network, curve, train=True))
            for name, found in reference(curve).items():
                references.setdefault(name, []).append(found)
    rules = {
        OURS: Frontier.of(curves, np.array([s.stops for s in seen]).T),
        f"{OURS}, training loss known": Frontier.of(curves, np.array([s.stops for s in told]).T),
    }
    for name, found in references.items():
        stops = [r.stops(len(c)) for r, c in zip(found, curves, strict=True)]
        rules[name] = Frontier.of(curves, np.array(stops).T)
    rules["patience"] = Frontier.of(
        curves, np.array([patience_stops(curves, p) for p in PATIENCES])
    )
    return {
        "curves": {"judged on": counts(curves), "trained on": counts([*others, *made])},
        "frontier": _frontier(rules),
        "kinds": _kinds(rules, curves),
        "presets": _presets(seen, curves),
        "late": _late(rules),
        "chances": _chances(curves, seen, references),
        "milliseconds": _speed(),
    }


def growth(data: Path, plan: Plan) -> dict[str, Any]:
    """What more of our own runs bring."""
    dev, others = collected(data, plan.every)
    made = simulated_curves(max(plan.sizes), keep=plan.keep)
    found = {}
    for size in plan.sizes:
        train = Trainer(plan.recipe, made[: len(made) * size // max(plan.sizes)])
        seen = [
            Seen.of(network, curve, train=False)
            for fold in folds(dev, others)
            for network in [train(fold.train)]
            for curve in fold.test
        ]
        curves = [s.curve for s in seen]
        rule = Frontier.of(curves, np.array([s.stops for s in seen]).T)
        found[str(size)] = {
            name: [rule.saved_at(regret, rule.micro), rule.saved_at(regret, rule.macro)]
            for name, regret in REGRETS.items()
        }
    return {"sizes": found}


def collected(data: Path, every: int = 1) -> tuple[list[LearningCurve], list[LearningCurve]]:
    """Curves to judge on, and further ones to train on."""
    dev = usable(read_table(data / "dev.csv.gz"))
    others = usable(read_table(data / "permissive.csv.gz"))
    others += usable(read_bulk(data / "bulk_apache.npz"))
    return dev[::every], others[::every]


def counts(curves: Sequence[LearningCurve]) -> dict[str, list[int]]:
    """Curves and groups of each kind."""
    groups = {
        kind: {c.group for c in curves if c.kind == kind} for kind in {c.kind for c in curves}
    }
    of = Counter(c.kind for c in curves)
    return {kind: [of[kind], len(groups[kind])] for kind in sorted(groups)}


def _frontier(rules: dict[str, Frontier]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, regret in REGRETS.items():
        for mean in ("micro", "macro"):
            found[f"{name} {mean}"] = {
                "regret": regret,
                "saved": at_regret(rules, regret, mean == "macro"),
                "over": over(rules, OURS, regret, mean == "macro"),
            }
    return found


def _kinds(rules: dict[str, Frontier], curves: Sequence[LearningCurve]) -> dict[str, Any]:
    kinds = np.array([c.kind for c in curves])
    found: dict[str, Any] = {}
    for kind in sorted(set(kinds)):
        of_kind = {name: rule.only(kinds == kind) for name, rule in rules.items()}
        found[kind] = {
            f"{preset} {mean}": at_regret(of_kind, regret, mean == "macro")
            for preset, regret in REGRETS.items()
            for mean in ("micro", "macro")
        }
    return found


def _presets(seen: Sequence[Seen], curves: Sequence[LearningCurve]) -> dict[str, Any]:
    """Rules with a fixed threshold; the presets' prices come from curves of the other folds."""
    apart = {f: preset_prices([s for s in seen if s.fold != f]) for f in {s.fold for s in seen}}
    stops: dict[str, Sequence[int] | np.ndarray] = {
        preset: [s.stops_at(apart[s.fold][preset]) for s in seen] for preset in REGRETS
    }
    stops |= {f"patience {p}": patience_stops(curves, p) for p in SHOWN}
    stops["oracle"] = [int(np.argmax(c.best >= c.best[-1])) + 1 for c in curves]
    found = {}
    for name, made in stops.items():
        replayed = Replay.of(curves, made)
        found[name] = {
            "saved": replayed.saved.mean(),
            "regret": replayed.regret.mean(),
            "regret p95": np.quantile(replayed.regret, 0.95),
            "late regret": replayed.late_regret.mean(),
        }
    return found


def _late(rules: dict[str, Frontier]) -> dict[str, Any]:
    """Regret against the range after the first tenth, where each saves as much as patience does."""
    patience = rules["patience"]
    found = {}
    for p in (5, 10, 20, 30):
        i = PATIENCES.index(p)
        saved = float(patience.saved[i].mean())
        found[str(p)] = {"saved": saved} | {
            name: rule.late_at(saved, rule.micro) for name, rule in rules.items()
        }
    return found


def _chances(
    curves: Sequence[LearningCurve], seen: Sequence[Seen], references: dict[str, list[Reference]]
) -> dict[str, Any]:
    """How good the chances of a noticeable improvement are."""
    from sklearn.metrics import log_loss, roc_auc_score

    happened = [improvements(c, s.at) > NOTICEABLE for c, s in zip(curves, seen, strict=True)]
    kinds = np.repeat([c.kind for c in curves], [len(h) for h in happened])
    truth = np.concatenate(happened)
    raw = {OURS: [1 - s.probabilities[:, 0] for s in seen]}
    raw |= {name: [r.chance for r in found] for name, found in references.items()}
    fold = np.repeat([s.fold for s in seen], [len(h) for h in happened])
    chances = {}
    for name, parts in raw.items():
        chances[f"{name}, not calibrated"] = np.concatenate(parts)
        chances[name] = _put_right(np.concatenate(parts), truth, fold)
    table: dict[str, Any] = {}
    for name, found in chances.items():
        chance = np.clip(found, 1e-4, 1 - 1e-4)
        table[name] = {
            kind: [calibration_error(p, y), roc_auc_score(y, p), log_loss(y, p)]
            for kind in ["all", *sorted(set(kinds))]
            for chosen in [(kinds == kind) | (kind == "all")]
            for p, y in [(chance[chosen], truth[chosen])]
        }
    return table


def _put_right(chance: np.ndarray, happened: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """Chances calibrated by what happened to the curves of the other folds."""
    chance = np.clip(chance, 1e-6, 1 - 1e-6)
    odds, found = np.log(chance / (1 - chance)), np.zeros_like(chance)
    for f in np.unique(fold):
        slope, shift = platt(chance[fold != f], happened[fold != f])
        found[fold == f] = 1 / (1 + np.exp(-slope * odds[fold == f] - shift))
    return found


def _speed() -> dict[str, float]:
    """Milliseconds for a decision after so many evaluations, and for replaying 1,000 of them."""
    random = np.random.default_rng(0)
    found = {}
    for done in (10, 100, 1000, 10_000):
        rule = PredictiveStopping("min")
        history = (1 + np.arange(done)) ** -0.5 + 0.01 * random.normal(size=done)
        rule.load_state_dict({"values": history, "train_values": history})
        found[f"decision after {done}"] = _median_time(lambda r=rule: r.update(0.1, 0.1, 20_000))
    values = (1 + np.arange(1000)) ** -0.5
    found["replay of 1000"] = _median_time(lambda: stopping_epoch(values, "min", 1000))
    return found


def _median_time(call: Callable[[], object], repeats: int = 51) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))
