"""The results of `benchmarks.layerwise_lr_decay` as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

CONTESTANTS = (
    "bare again",
    "LayerwiseLRDecay",
    "groups split by hand",
    "LayerwiseLRDecay, biases exempt",
    "groups split by hand, biases exempt",
)


def report(results: dict[str, Any]) -> str:
    """The whole page.

    Args:
        results: What the JSON file holds.
    """
    parts = ["# Layer-wise learning rate decay", _setting(results)]
    if steps := results.get("step"):
        parts += ["## Step time over the bare fit", *_steps(steps)]
    if gain := results.get("gain"):
        parts += ["## Fine-tuning gain", *_gain(gain)]
    return "\n\n".join(parts) + "\n"


def _setting(results: dict[str, Any]) -> str:
    lines = [
        "Written by `python -m benchmarks.layerwise_lr_decay`; `benchmarks/README.md` says how to "
        "read it."
    ]
    for part in ("step", "gain"):
        if run := results.get(part, {}).get("run"):
            versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
            lines.append(
                f"Part `{part}`: {run['date']}, {run['cores']} cores, {run['threads']} thread per "
                f"process, load {run['load_before']} before and {run['load_after']} after; "
                f"{versions}."
            )
    return "\n\n".join(lines)


def _steps(steps: dict[str, Any]) -> Iterable[str]:
    yield (
        "Median of the paired ratios, with its 95% bootstrap interval. *Bare again* is a second "
        "bare fit: how far it is from 1 is the noise."
    )
    for model in dict.fromkeys(case["model"] for case in steps["cases"]):
        cases = [case for case in steps["cases"] if case["model"] == model]
        shape = cases[0]["shape"]
        yield (
            f"### {model}: batch {shape['batch']}, {(shape['image'] // shape['patch']) ** 2} tokens"
        )
        for key, what in (("ratio", "Wall time"), ("cpu_ratio", "CPU time of the process")):
            yield f"{what}:"
            yield _ratios(cases, key)


def _ratios(cases: Sequence[dict[str, Any]], key: str) -> str:
    names = [name for name in CONTESTANTS if any(name in c["contestants"] for c in cases)]
    rows = []
    for case in cases:
        found = case["contestants"]
        cells = [interval(found[n][key], 3) if n in found else "" for n in names]
        steps = sum(len(run) for run in case["wall_ms"]["bare"])
        bare = f"{found['bare']['median_ms']:.1f}"
        rows.append([case["framework"], case["optimizer"], str(steps), bare, *cells])
    return table(["framework", "optimizer", "steps", "bare, ms", *names], rows)


def _gain(gain: dict[str, Any]) -> Iterable[str]:
    yield (
        "Test accuracy in percent, with 95% intervals (Student's t over the seeds); the difference "
        "is paired by seed. The base rate was chosen for each decay on validation samples and "
        "other seeds; the star marks the decay that the same validation prefers."
    )
    for network in gain["networks"]:
        yield (
            f"### {network['network']}: {network['seeds']} seeds, "
            f"{network['pretrained']:.1f}% on held-out samples of the pretraining classes"
        )
        best = max(row["validation"] for row in network["rows"])
        rows = [
            [
                f"{row['decay']:g}" + (" *" if row["validation"] == best else ""),
                f"{row['rate']:g}",
                f"{row['validation']:.1f}",
                interval(row["accuracy"], 1),
                interval(row["gain"], 1, sign="+") if row["gain"] else "",
                f"{row['better']} / {row['worse']}" if row["gain"] else "",
            ]
            for row in network["rows"]
        ]
        yield table(
            [
                "decay",
                "base rate",
                "validation",
                "test accuracy",
                "difference to 1.0",
                "seeds better / worse",
            ],
            rows,
        )


def interval(numbers: Sequence[float], digits: int, sign: str = "") -> str:
    """An estimate with its bounds: `1.004 (0.998 to 1.010)`."""
    estimate, low, high = (f"{number:{sign}.{digits}f}" for number in numbers)
    return f"{estimate} ({low} to {high})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
