"""What `LayerwiseLRDecay` gains when a pretrained network is fine-tuned on few samples.

Digits 0 to 5 are known from pretraining, 6 to 9 are new; five labelled samples of each of the ten
are there to fine-tune on. A fixed fifth of the data serves to choose the base rate and nothing
else; the rest is split anew for every seed.
"""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from benchmarks._stats import mean_interval

NETWORKS = ("vision transformer", "convolutional network")
DECAYS = (1.0, 0.9, 0.75, 0.65)
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
KNOWN = 6  # classes that pretraining sees
SHOTS = 5  # labelled samples of each class


@dataclass(frozen=True)
class Plan:
    """How much is trained. The seeds that choose the rates and those that are tested differ."""

    test_seeds: tuple[int, ...] = tuple(range(20))
    choice_seeds: tuple[int, ...] = tuple(range(100, 105))
    rates: tuple[float, ...] = RATES
    pretrain_epochs: int = 40
    finetune_epochs: int = 30


QUICK = Plan(
    test_seeds=(0, 1), choice_seeds=(100,), rates=(1e-3,), pretrain_epochs=1, finetune_epochs=1
)


@dataclass(frozen=True)
class Job:
    """One seed of one network: pretrained once, fine-tuned at every setting."""

    network: str
    seed: int
    settings: tuple[tuple[float, float], ...]  # decay and base rate
    choosing: bool
    plan: Plan


@cache
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, labels, and which samples are there to choose the rate."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    chosen = np.zeros(len(labels), bool)
    _, held = train_test_split(
        np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    chosen[held] = True
    return images.reshape(-1, 1, 8, 8).astype("float32") / 8 - 1, labels, chosen


def split(
    labels: np.ndarray, held: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Disjoint indices to pretrain on, to fine-tune on, and to test on.

    Args:
        labels: Class of every sample.
        held: Which samples none of the three may hold.
        seed: Of the split.
    """
    generator = np.random.default_rng(seed)
    pretrain, finetune, test = [], [], []
    for label in np.unique(labels):
        samples = generator.permutation(np.flatnonzero((labels == label) & ~held))
        seen = 2 * len(samples) // 3
        # The new classes keep as many test samples as the known ones.
        pretrain += list(samples[:seen]) if label < KNOWN else []
        finetune += list(samples[seen : seen + SHOTS])
        test += list(samples[seen + SHOTS :])
    return np.array(pretrain), np.array(finetune), np.array(test)


def run(job: Job) -> list[dict[str, Any]]:
    """Accuracy at every setting of a job; a worker process runs this."""
    from benchmarks import _layerwise_finetuning as tuning

    _quietly()
    images, labels, held = digits()
    pretrain, finetune, test = split(labels, held, job.seed)
    test = np.flatnonzero(held) if job.choosing else test
    body, known = tuning.pretrained(
        job.network, images[pretrain], labels[pretrain], job.plan.pretrain_epochs, job.seed
    )
    records = []
    shots, epochs = (images[finetune], labels[finetune]), job.plan.finetune_epochs
    for decay, rate in job.settings:
        net = tuning.finetuned(body, *shots, decay, rate, epochs, job.seed)
        accuracy = tuning.accuracy(net, images[test], labels[test])
        records.append(
            {
                "network": job.network,
                "seed": job.seed,
                "decay": decay,
                "rate": rate,
                "accuracy": accuracy,
                "pretrained": known,
            }
        )
    return records


def one_is_nothing(network: str) -> bool:
    """Whether `LayerwiseLRDecay(1.0)` learns to the bit what a fit without it does."""
    import torch

    from benchmarks import _layerwise_finetuning as tuning

    _quietly()
    images, labels, held = digits()
    _, finetune, _ = split(labels, held, seed=0)
    body = tuning.network(network, KNOWN)
    nets = [
        tuning.finetuned(body, images[finetune], labels[finetune], decay, 1e-3, epochs=2, seed=0)
        for decay in (1.0, None)
    ]
    return all(map(torch.equal, nets[0].state_dict().values(), nets[1].state_dict().values()))


def _quietly() -> None:
    """One thread, and none of Lightning's remarks."""
    import torch

    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def measure(plan: Plan, networks: Sequence[str] = NETWORKS) -> dict[str, Any]:
    """Choose the rates, then test them.

    Args:
        plan: How much is trained.
        networks: Which of `NETWORKS`. Default: all.
    """
    grid = tuple((decay, rate) for decay in DECAYS for rate in plan.rates)
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        if not all(pool.map(one_is_nothing, networks)):
            raise AssertionError("LayerwiseLRDecay(1.0) learnt other weights than a fit without it")
        jobs = [Job(n, s, grid, True, plan) for n in networks for s in plan.choice_seeds]
        choice = _flat(pool.imap(run, jobs))
        rates = {n: chosen_rates(r for r in choice if r["network"] == n) for n in networks}
        jobs = [
            Job(n, s, tuple(rates[n].items()), False, plan)
            for n in networks
            for s in plan.test_seeds
        ]
        test = _flat(pool.imap(run, jobs))
    summaries = [
        summarise(n, *[[r for r in records if r["network"] == n] for records in (choice, test)])
        for n in networks
    ]
    return {"networks": summaries, "choice": choice, "test": test}


def _flat(results: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    records = []
    for result in results:
        records += result
        print(f"fine-tuning: {result[0]['network']}, seed {result[0]['seed']}", flush=True)
    return records


def chosen_rates(records: Iterable[dict[str, Any]]) -> dict[float, float]:
    """For each decay, the base rate with the best mean accuracy; the smaller one of equals."""
    accuracies: dict[tuple[float, float], list[float]] = {}
    for r in records:
        accuracies.setdefault((r["decay"], r["rate"]), []).append(r["accuracy"])
    rates: dict[float, float] = {}
    for decay, rate in sorted(accuracies):
        best = rates.get(decay)
        if best is None or np.mean(accuracies[decay, rate]) > np.mean(accuracies[decay, best]):
            rates[decay] = rate
    return dict(sorted(rates.items(), reverse=True))


def summarise(
    network: str, choice: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Mean accuracy by decay, and what it gains over 1.0 on the same seeds, in percent.

    Args:
        network: Name of the network.
        choice: Records of the seeds that chose the rates.
        test: Records of the tested seeds.
    """
    by_decay: dict[float, dict[int, float]] = {}
    for r in test:
        by_decay.setdefault(r["decay"], {})[r["seed"]] = 100 * r["accuracy"]
    rates = chosen_rates(choice)
    plain = by_decay[1.0]
    rows = []
    for decay, accuracy in by_decay.items():
        seen = [r["accuracy"] for r in choice if (r["decay"], r["rate"]) == (decay, rates[decay])]
        gain = mean_interval([accuracy[seed] - plain[seed] for seed in accuracy])
        rows.append(
            {
                "decay": decay,
                "rate": rates[decay],
                "validation": 100 * float(np.mean(seen)),
                "accuracy": list(mean_interval(list(accuracy.values()))),
                "gain": list(gain) if decay != 1.0 else None,
                "better": sum(accuracy[s] > plain[s] for s in accuracy),
                "worse": sum(accuracy[s] < plain[s] for s in accuracy),
            }
        )
    known = [100 * r["pretrained"] for r in test]
    return {
        "network": network,
        "seeds": len(plain),
        "rows": rows,
        "pretrained": float(np.mean(known)),
    }
