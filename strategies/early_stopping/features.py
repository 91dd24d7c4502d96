"""What a learning curve looks like at a moment, as numbers without unit.

Everything is relative to the range seen so far or to the epochs done, so scaling, shifting or
turning a curve upside down changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from strategies.early_stopping.history import Array, Events, Extremes, Sums, filled

Index = NDArray[np.int64]

_WINDOWS = (1, 2, 3, 5, 8, 13, 20, 30, 50)
_SHARES = (0.1, 0.2, 0.35, 0.5, 0.75)
_TINY = 1e-9
_TIE = 1e-9  # of the range
_SMALL = 1e-5  # of the range


def _log(x: Array, floor: float = 1e-4) -> Array:
    """Logarithm that keeps sign and order: zero at zero, steep near it."""
    return np.sign(x) * np.log1p(np.abs(x) / floor)


def _part(x: Array) -> Array:
    return np.clip(x, -20.0, 20.0)


class Curve:
    """One curve, prepared for features at any of its moments.

    Args:
        values: Metric, higher is better, NaN where missing.
        train: Training metric of the same evaluations, higher is better, or None.
    """

    def __init__(self, values: Array, train: Array | None = None) -> None:
        self.known = np.isfinite(values)
        y = filled(values)
        self.origin = y[0]
        self.unit = float(np.ptp(y)) or 1.0
        self.y = (y - self.origin) / self.unit
        self.best = np.maximum.accumulate(self.y)
        self.worst = np.minimum.accumulate(self.y)
        self.range = self.best - self.worst
        # Rounding must not make a new best value of a tie: scaled and shifted curves are equal.
        slack = _TIE * self.range[:-1]
        self.records = Events([True], self.y[1:] > self.best[:-1] + slack)
        self.lows = Events([True], self.y[1:] < self.worst[:-1] - slack)
        self.repeats = Events([False], np.abs(np.diff(self.y)) <= slack)
        self.missing = Events(~self.known)
        self.sums, self.extremes = Sums(self.y), Extremes(self.y)
        self.train: Curve | None = None
        if train is not None and np.isfinite(train).any():
            self.train = Curve(train)


def features(curve: Curve, at: Index) -> dict[str, Array]:
    """Features that need no budget, by name, at the moments after `at` evaluations.

    Only the first `at[i]` values have a part in row `i`.
    """
    columns: dict[str, Array] = {}
    put = columns.__setitem__
    last = at - 1
    done = at.astype(np.float64)
    put("log_done", np.log(done))
    _shape(curve, last, done, put)
    _windows(curve, last, done, put)
    put("missing", curve.missing.count(last) / done)
    other = curve.train
    # Known where at least half of its values so far are.
    known = np.zeros(len(at), bool) if other is None else 2 * other.missing.count(last) <= done
    put("train_known", known.astype(float))
    seen: dict[str, Array] = {}
    _train(curve, other, last, done, seen.__setitem__)
    return columns | {name: np.where(known, values, 0.0) for name, values in seen.items()}


def budget_features(columns: dict[str, Array], at: Index, budget: Array) -> dict[str, Array]:
    """Features that depend on how many evaluations are planned; NaN where that is unknown."""
    done = at.astype(np.float64)
    known = np.isfinite(budget)
    total = np.where(known, np.maximum(budget, done), 2 * done)
    ahead = np.log(total / done)
    return {
        "budget_known": known.astype(float),
        "log_left": np.log1p(total - done),
        "progress": done / total,
        "log_ratio": ahead,
        "since_best_of_total": columns["since_best_of_done"] * done / total,
        "extrapolated": _log(columns["half_gain"] * ahead),
        "train_extrapolated": _log(columns["train_half_gain"] * ahead),
    }


def _shape(curve: Curve, last: Index, done: Array, put: Callable[[str, Array], None]) -> None:
    scale = np.maximum(curve.range[last], _TINY)
    since = (last - curve.records.newest(last)).astype(float)
    put("flat", (curve.range[last] <= _TINY).astype(float))
    put("log_since_best", np.log1p(since))
    put("since_best_of_done", since / done)
    put("since_worst_of_done", (last - curve.lows.newest(last)) / done)
    put("gap", (curve.best[last] - curve.y[last]) / scale)
    put("log_gap", _log((curve.best[last] - curve.y[last]) / scale))
    put("records", curve.records.count(last) / done)
    put("repeats", curve.repeats.count(last) / done)
    for share in (0.1, 0.3, 0.5):
        begin = np.minimum((share * done).astype(np.int64), last)
        rest = curve.best[last] - curve.extremes.low(begin, last + 1)
        put(f"range_after_{share}", rest / scale)
        put(f"log_range_after_{share}", _log(rest / scale))
    newest, older, oldest = (curve.records.newest(last, k) for k in (1, 2, 3))
    put("newest_record", _log((curve.best[newest] - curve.best[older]) / scale))
    put("older_record", _log((curve.best[older] - curve.best[oldest]) / scale))
    put("log_between_records", np.log1p(newest - older))
    put("log_between_older", np.log1p(older - oldest))
    half, quarter = (np.maximum((done * s).astype(np.int64) - 1, 0) for s in (0.5, 0.25))
    b, b2, b4 = curve.best[last], curve.best[half], curve.best[quarter]
    ratio = (b - b2 + 1e-4 * scale) / (b2 - b4 + 1e-4 * scale)
    put("log_halving_ratio", np.log(ratio))
    put("half_gain", (b - b2) / scale)


def _windows(curve: Curve, last: Index, done: Array, put: Callable[[str, Array], None]) -> None:
    scale = np.maximum(curve.range[last], _TINY)
    begin = np.minimum((0.3 * done).astype(np.int64), last)
    settled = curve.best[last] - curve.extremes.low(begin, last + 1)
    # Not below what rounding of a curve far from zero amounts to.
    local = np.maximum(settled, np.maximum(_SMALL * scale, _TINY))
    end = last + 1
    for window in _WINDOWS:
        before = np.maximum(last - window, 0)
        gain = (curve.best[last] - curve.best[before]) / scale
        put(f"log_gain_{window}", np.where(last >= window, _log(gain), -1.0))
    for share in _SHARES:
        width = np.maximum((share * done).astype(np.int64), 1)
        before = np.maximum(last - width, 0)
        gain = curve.best[last] - curve.best[before]
        put(f"log_gain_{share}", _log(gain / scale))
        put(f"local_gain_{share}", gain / local)
        put(f"records_{share}", (curve.records.count(last) - curve.records.count(before)) / width)
    spans = [(f"{w}", np.minimum(w, end)) for w in (3, 5, 10, 20)]
    spans += [(f"{s}", np.maximum((s * done).astype(np.int64), 1)) for s in (0.15, 0.3, 0.6)]
    for name, width in spans:
        begin = end - width
        earlier = np.maximum(begin - width, 0)
        mean = curve.sums.mean(begin, end)
        past = curve.sums.mean(earlier, np.maximum(begin, earlier + 1))
        put(f"mean_gap_{name}", _log((curve.best[last] - mean) / scale, 1e-3))
        put(f"trend_{name}", _log((mean - past) / scale, 1e-3))
        put(f"slope_{name}", _part(curve.sums.slope(begin, end) / local))
        put(f"noise_{name}", np.log(curve.sums.step(begin, end) / scale + 1e-5))
        put(f"low_{name}", _part((curve.best[last] - curve.extremes.high(begin, end)) / local))
    noise = curve.sums.step(np.maximum(end - 10, 0), end)
    wide = curve.sums.deviation(np.maximum(end - 10, 0), end)
    put("roughness", noise / (wide + 0.01 * local))


def _train(
    curve: Curve,
    other: Curve | None,
    last: Index,
    done: Array,
    put: Callable[[str, Array], None],
) -> None:
    names = ["train_since_best", "train_gap", "train_halving", "train_half_gain"]
    shares = (0.1, 0.3, 0.6)
    names += [f"{kind}_{s}" for s in shares for kind in ("train_gain", "train_trend", "parting")]
    if other is None:
        for name in names:
            put(name, np.zeros(len(last)))
        return
    scale = np.maximum(other.range[last], _TINY)
    own = np.maximum(curve.range[last], _TINY)
    put("train_since_best", (last - other.records.newest(last)) / done)
    put("train_gap", _log((other.best[last] - other.y[last]) / scale, 1e-3))
    half, quarter = (np.maximum((done * s).astype(np.int64) - 1, 0) for s in (0.5, 0.25))
    b, b2, b4 = other.best[last], other.best[half], other.best[quarter]
    put("train_halving", np.log((b - b2 + 1e-4 * scale) / (b2 - b4 + 1e-4 * scale)))
    put("train_half_gain", (b - b2) / scale)
    end = last + 1
    for share in shares:
        width = np.maximum((share * done).astype(np.int64), 1)
        begin = end - width
        earlier = np.maximum(begin - width, 0)

        def trend(c: Curve, unit: Array) -> Array:
            past = c.sums.mean(earlier, np.maximum(begin, earlier + 1))  # noqa: B023
            return (c.sums.mean(begin, end) - past) / unit  # noqa: B023

        before = np.maximum(last - width, 0)
        put(f"train_gain_{share}", _log((other.best[last] - other.best[before]) / scale))
        put(f"train_trend_{share}", _log(trend(other, scale), 1e-3))
        put(f"parting_{share}", trend(other, scale) - trend(curve, own))
