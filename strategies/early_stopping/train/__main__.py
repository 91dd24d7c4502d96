"""Rebuild the shipped weights, or make your own: `python -m strategies.early_stopping.train`."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from strategies.early_stopping.network import Network
from strategies.early_stopping.train.curves import LearningCurve, read_bulk, read_table, usable
from strategies.early_stopping.train.evaluate import (
    REGRETS,
    Seen,
    calibration,
    cross_validated,
    preset_prices,
)
from strategies.early_stopping.train.fit import Recipe
from strategies.early_stopping.train.folder import read_folder
from strategies.early_stopping.train.replay import Replay
from strategies.early_stopping.train.trainer import SIMULATED, Trainer, simulated_curves

_FEW = 20  # curves below which nothing can be calibrated


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.data is None and options.folder is None:
        parser.error("pass --data to train, --folder to calibrate by your own runs, or both")
    own = usable(read_folder(options.folder)) if options.folder else []
    if options.folder and len(own) < _FEW:
        raise SystemExit(
            f"{options.folder} holds {len(own)} curves of 8 evaluations or more; at least {_FEW} "
            "are needed"
        )
    if options.data is None:
        # The calibration is found anew, so it must not be in force yet.
        network = Network.load()
        network = network.settled(network.prices, (1.0, 0.0))
        seen = [Seen.of(network, curve, train=False) for curve in own]
    else:
        network, seen = _trained(options, own)
    prices = preset_prices(seen)
    network.settled(prices, calibration(seen)).save(options.out)
    _summary(seen, prices)
    _say(f"wrote {options.out}")


def _trained(options: argparse.Namespace, own: list[LearningCurve]) -> tuple[Network, list[Seen]]:
    dev = usable(read_table(options.data / "dev.csv.gz"))
    others = usable(read_table(options.data / "permissive.csv.gz"))
    others += usable(read_bulk(options.data / "bulk_apache.npz"))
    _say(f"{len(dev)} curves to judge on, {len(others)} to train on; simulating more")
    made = simulated_curves(options.simulated, options.seed, options.workers, options.keep)
    _say(f"{len(made)} simulated curves, of {len({c.group for c in made})} groups")
    recipe = replace(Recipe(), seed=options.seed)
    if options.steps:
        recipe = replace(recipe, steps=options.steps)
    train = Trainer(recipe, made, options.seed, lambda i, loss: _say(f"{i:6d} {loss:.4f}"))
    tested = own or dev
    seen = list(cross_validated(train, tested, [*others, *(dev if own else ())]))
    return train([*(c for c in dev if c.free), *others, *own]), seen


def _summary(seen: Sequence[Seen], prices: dict[str, float]) -> None:
    curves = [s.curve for s in seen]
    _say(
        f"judged on {len(seen)} curves: {dict(Counter(c.kind for c in curves))}; prices are set so"
    )
    _say("that on these curves the mean regret is 0.2, 0.8 and 1.6% of the range:")
    for preset in REGRETS:
        stops = [s.stops_at(prices[preset]) for s in seen]
        replay = Replay.of(curves, stops)
        _say(
            f"{preset:9s} price {prices[preset]:.4f} saves {100 * replay.saved.mean():.1f}% "
            f"at a mean regret of {100 * replay.regret.mean():.2f}% of the range"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m strategies.early_stopping.train")
    add = parser.add_argument
    add("--data", type=Path, help="folder of collected curves; without, weights stay as shipped")
    add("--folder", type=Path, help="folder of your own runs, to train on or calibrate by")
    add("--out", type=Path, required=True, help="file to write, .npz")
    add("--simulated", type=int, default=SIMULATED, help="training runs to make")
    add("--steps", type=int, default=0, help="optimizer steps (default: those of the recipe)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes that simulate")
    add("--keep", type=Path, help="folder in which simulated curves are kept for the next time")
    add("--seed", type=int, default=0)
    return parser


_START = time.monotonic()


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _START:6.0f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
