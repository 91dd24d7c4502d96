"""The results of `benchmarks.early_stopping` as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def report(results: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = [
        "# Predictive early stopping",
        "Written by `python -m benchmarks.early_stopping`; `benchmarks/README.md` says how to "
        "read it.",
        *_settings(results),
    ]
    if replay := results.get("replay"):
        parts += ["## Replayed on curves of families never seen", *_replay(replay)]
    if growth := results.get("growth"):
        parts += ["## What more simulated runs bring", *_growth(growth)]
    if live := results.get("live"):
        parts += ["## Live", *_live(live)]
    return "\n\n".join(parts) + "\n"


def _settings(results: Mapping[str, Any]) -> Iterable[str]:
    for part, content in results.items():
        if run := content.get("run"):
            versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
            yield (
                f"Part `{part}`: {run['date']} to {run['end']}, {run['cores']} cores, "
                f"{run['threads']} thread, load {run['load_before']} before and "
                f"{run['load_after']} after; {versions}."
            )


def _replay(replay: Mapping[str, Any]) -> Iterable[str]:
    for what, kinds in replay["curves"].items():
        listed = ", ".join(f"{kind} {n} ({g} groups)" for kind, (n, g) in kinds.items())
        yield f"Curves {what}: {listed}."
    yield (
        "Evaluations saved, in %, where the mean regret is 0.2, 0.8 and 1.6% of the range, with "
        "95% intervals (bootstrap over families); in the lower tables how much more the network "
        "saves, on the same resamples."
    )
    for mean, means in (("micro", "each curve counts the same"), ("macro", "each group does")):
        cells = {name.split()[0]: v for name, v in replay["frontier"].items() if mean in name}
        yield f"### {mean}: {means}"
        yield _grid({k: v["saved"] for k, v in cells.items()})
        yield "Network minus the others:"
        yield _grid({k: v["over"] for k, v in cells.items()}, signed=True)
    yield "### By kind"
    for kind, columns in replay["kinds"].items():
        yield f"{kind}:"
        yield _grid(columns)
    yield "### At fixed thresholds"
    columns = ["saved", "regret", "regret p95", "late regret"]
    yield _table(
        ["rule", *columns],
        [[k, *(f"{100 * v[c]:.2f}" for c in columns)] for k, v in replay["presets"].items()],
    )
    yield "*Late regret* is against the range after the first tenth of the curve."
    yield "### Late regret, in %, where each rule saves as much as patience does"
    rules = [name for name in next(iter(replay["late"].values())) if name != "saved"]
    rows = [
        [f"{p} ({100 * v['saved']:.1f} saved)", *(f"{100 * v[rule]:.2f}" for rule in rules)]
        for p, v in replay["late"].items()
    ]
    yield _table(["patience", *rules], rows)
    yield "### Chance of an improvement: calibration error / AUC / log-loss"
    models = list(replay["chances"])
    kinds = list(replay["chances"][models[0]])
    rows = [
        [kind, *(" / ".join(f"{x:.3f}" for x in replay["chances"][m][kind]) for m in models)]
        for kind in kinds
    ]
    yield _table(["kind", *models], rows)
    times = ", ".join(f"{name} {ms:.2f}" for name, ms in replay["milliseconds"].items())
    yield f"Milliseconds on one core: {times}."


def _grid(columns: Mapping[str, Mapping[str, Sequence[float]]], signed: bool = False) -> str:
    rules = list(next(iter(columns.values())))
    sign = "+" if signed else ""
    rows = []
    for rule in rules:
        cells = []
        for column in columns.values():
            estimate, low, high = (100 * x for x in column[rule])
            cells.append(f"{estimate:{sign}.1f} ({low:{sign}.1f} to {high:{sign}.1f})")
        rows.append([rule, *cells])
    return _table(["rule", *columns], rows)


def _growth(growth: Mapping[str, Any]) -> Iterable[str]:
    yield "Evaluations saved, in %: each curve counts the same / each group does."
    sizes = growth["sizes"]
    presets = list(next(iter(sizes.values())))
    rows = [
        [f"{int(n):,}", *(" / ".join(f"{100 * x:.1f}" for x in found[p]) for p in presets)]
        for n, found in sizes.items()
    ]
    yield _table(["simulated runs", *presets], rows)


def _live(live: Mapping[str, Any]) -> Iterable[str]:
    yield (
        f"{live['seeds']} seeds; medians over seeds. *Lost* is how much worse the best validation "
        "metric is than with the full budget, in % of the range of the full run."
    )
    rows = [
        [
            case["framework"], case["task"], str(case["epochs"]), case["rule"],
            f"{100 * case['saved']:.1f}", f"{100 * case['lost']:.2f}", f"{case['metric']:.4f}",
            f"{case['seconds']:.1f}",
        ]
        for case in live["cases"]
    ]  # fmt: skip
    head = ["framework", "task", "budget", "rule", "saved, %", "lost, %", "best metric", "seconds"]
    yield _table(head, rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
