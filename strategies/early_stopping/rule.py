"""When to stop: what a curve will still bring, weighed against the evaluations that it takes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.early_stopping.forecast import (
    MINIMUM,
    Forecast,
    View,
    chance_of_more,
    checked,
    checked_budget,
)
from strategies.early_stopping.history import MODES, Array
from strategies.early_stopping.network import network_of

PRESETS = ("safe", "balanced", "fast")
_LOST = 3  # evaluations in a row without a number, after which a run is given up


@dataclass(frozen=True, slots=True)
class StopDecision:
    """Whether to stop after an evaluation, and why.

    Args:
        stop: Whether training should end now.
        cause: `"gain"`, `"target"`, `"flat"`, `"patience"` or `"diverged"` if it should, else
            `"go on"`.
        reason: Why, in one sentence.
        held: What keeps it from ending now; None if nothing does, or it should not end anyway.
        improved: Whether this evaluation was the best so far.
        forecast: What is expected; None before the third evaluation.
        expected_best: The best value to expect by the end, in the units of the metric; NaN while
            there is no forecast.
    """

    stop: bool
    cause: str
    reason: str
    held: str | None
    improved: bool
    forecast: Forecast | None
    expected_best: float


@dataclass
class PredictiveStopping:
    """The rule behind `PredictiveEarlyStopping`: one `update` for each evaluation.

    Nothing is latched: each evaluation is judged anew, by the whole history.

    Args:
        mode: `"min"` if lower is better, `"max"` if higher is.
        preset: What an evaluation is worth: `"safe"`, `"balanced"` and `"fast"` were set to give
            up 0.2%, 0.8% and 1.6% of a curve's range on average. Default: `"balanced"`.
        min_improvement: Instead of a preset: stop when less improvement than this is expected, as
            a share of the range seen so far. Default: None.
        horizon: How many evaluations to look ahead. Default: None, to the end of the budget.
        target: A value to beat, in the units of the metric; stop when that has become unlikely.
            Default: None.
        p_target: The chance of beating `target` below which to stop. Default: 0.05.
        patience: Evaluations without a better value after which to stop where the curve looks
            like none in the training set, and without any other value after which to stop in any
            case. Default: 20.
        weights: File of other weights, as `python -m strategies.early_stopping.train` writes them.
            Default: None, those of the package.

    Raises:
        FileNotFoundError: There is no such file of weights.
        ValueError: An argument is out of its range, or the weights are damaged.
        TypeError: An argument has the wrong type.

    Example:
        >>> rule = PredictiveStopping("min", preset="fast")
        >>> rule.update(1.0, budget=100).stop
        False
    """

    mode: str
    preset: str = "balanced"
    min_improvement: float | None = None
    horizon: int | None = None
    target: float | None = None
    p_target: float = 0.05
    patience: int = 20
    weights: str | None = None
    values: array[float] = field(default_factory=lambda: array("d"), init=False, repr=False)
    train_values: array[float] = field(default_factory=lambda: array("d"), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be 'min' or 'max', got {self.mode!r}")
        if self.preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        if self.min_improvement is not None:
            _check_number("min_improvement", self.min_improvement, 0.0, 1.0)
        if self.target is not None:
            _check_number("target", self.target, -math.inf, math.inf)
        _check_number("p_target", self.p_target, 0.0, 1.0)
        _check_count("patience", self.patience)
        if self.horizon is not None:
            _check_count("horizon", self.horizon)
        network_of(self.weights)

    def update(
        self,
        value: float,
        train_value: float = math.nan,
        budget: int | None = None,
        *,
        hold: str | None = None,
        wait: str | None = None,
        left: str | None = None,
    ) -> StopDecision:
        """Take in one evaluation and decide.

        Args:
            value: The metric; what is not finite counts as missing.
            train_value: The training loss at that time. Default: NaN (unknown).
            budget: Evaluations planned in all, as far as is known now. Default: None.
            hold: Why not to stop yet, whatever happens, as the end of a sentence that begins with
                "held, as". Default: None.
            wait: Why not to stop yet unless the run has diverged, likewise. Default: None.
            left: What stopping saves, in the user's words. Default: the evaluations left.
        """
        value, train_value = float(value), float(train_value)
        self.values.append(value)
        self.train_values.append(train_value)
        y, train = checked(self.values, self.mode, self.train_values)
        done = len(y)
        before = np.fmax.reduce(y[:-1], initial=-np.inf)
        planned = checked_budget(None if budget is None else max(budget, done), done)
        view = View.of(
            network_of(self.weights), y, train, np.array([done]), self._limit(done, planned)
        )
        verdict = self.judge(view, y)
        cause, forecast = verdict.cause(0), view.forecast(0)
        reason = self._reason(cause, forecast)
        held = None
        if cause != "go on":
            if left is None and planned > done:
                left = f"{planned - done:.0f} evaluations"
            reason += f"; stopping saves {left}" if left else ""
            # No drop of the rate brings numbers back.
            held = hold or (None if cause == "diverged" else wait)
        if held:
            cause, reason = "go on", f"{reason}; held, as {held}"
        improved = bool(y[-1] > before)
        best = math.nan if forecast is None else self._expected(view, forecast)
        return StopDecision(cause != "go on", cause, reason, held, improved, forecast, best)

    def _expected(self, view: View, forecast: Forecast) -> float:
        curve, last = view.curve, view.at[0] - 1
        if not curve.known.any():
            return math.nan
        relative = curve.best[last] + forecast.expected_improvement * curve.range[last]
        return float(curve.origin + curve.unit * relative) * (1 if self.mode == "max" else -1)

    def judge(self, view: View, y: Array) -> Verdict:
        """What speaks for stopping at the moments of a view of the curve `y`, all at once."""
        network = view.network
        if self.min_improvement is None:
            enough = view.odds(network.prices[self.preset]) > 0
        else:
            enough = view.probabilities @ network.middles < self.min_improvement
        return self.verdict(view, y, enough)

    def verdict(self, view: View, y: Array, enough: NDArray[np.bool_]) -> Verdict:
        """The verdict where the network has had `enough` at some moments."""
        at = view.at
        open_ = ~(view.budget <= at)  # an unknown budget is open
        since = at - 1 - view.curve.records.newest(at - 1)
        return Verdict(
            diverged=open_ & view.lost(_LOST),
            target=open_ & view.trusted & self._hopeless(view, y),
            gain=open_ & view.trusted & enough,
            flat=open_ & view.unchanged(self.patience),
            patience=open_ & ~view.trusted & (since >= self.patience) & (at >= MINIMUM),
        )

    def _limit(self, at: int | NDArray[np.int64], budget: float) -> Array:
        """How far to look from each moment."""
        limit = np.full(np.shape(at) or 1, budget)
        return limit if self.horizon is None else np.fmin(limit, np.asarray(at) + self.horizon)

    def _hopeless(self, view: View, y: Array) -> NDArray[np.bool_]:
        if self.target is None:
            return np.zeros(len(view.at), dtype=bool)
        best = np.fmax.accumulate(np.where(np.isfinite(y), y, -np.inf))[view.at - 1]
        missing = (self.target if self.mode == "max" else -self.target) - best
        scale = np.maximum(view.curve.range[view.at - 1] * view.curve.unit, 1e-300)
        chance = chance_of_more(view.probabilities, view.network.edges, missing / scale)
        return (missing >= 0) & (chance < self.p_target)

    def _reason(self, cause: str, forecast: Forecast | None) -> str:
        if cause == "diverged":
            return f"{_LOST} evaluations in a row were not finite"
        if cause == "flat":
            return f"the metric has not changed in {self.patience} evaluations"
        if forecast is None:
            return "too few evaluations to say anything"
        if not forecast.in_distribution:
            return (
                "the curve looks like none in the training set, so patience "
                f"{self.patience} decides"
            )
        chance = f"{100 * forecast.p_improve:.0f}% chance of improving"
        if self.horizon is not None:
            chance += f" within {self.horizon} evaluations"
        if cause == "target":
            chance = f"less than {100 * self.p_target:g}% chance of beating {self.target:g}"
        return (
            f"{chance}; expected gain {100 * forecast.expected_improvement:.2g}% of the range seen"
        )

    def state_dict(self) -> dict[str, Any]:
        """The history, as plain values."""
        return {"values": list(self.values), "train_values": list(self.train_values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.values = array("d", state["values"])
        self.train_values = array("d", state["train_values"])

    def reset(self) -> None:
        """Forget the history."""
        self.values, self.train_values = array("d"), array("d")

    def replay(self, y: Array, train: Array | None, budget: float) -> Verdict:
        """What would have spoken for stopping after each evaluation of a curve."""
        at = np.arange(1, len(y) + 1)
        view = View.of(network_of(self.weights), y, train, at, self._limit(at, budget))
        return self.judge(view, y)


@dataclass(frozen=True)
class Verdict:
    """What speaks for stopping at some moments of a curve, by moment."""

    diverged: NDArray[np.bool_]
    target: NDArray[np.bool_]
    gain: NDArray[np.bool_]
    flat: NDArray[np.bool_]
    patience: NDArray[np.bool_]

    @property
    def stop(self) -> NDArray[np.bool_]:
        """Whether anything does."""
        return self.diverged | self.target | self.gain | self.flat | self.patience

    def cause(self, i: int) -> str:
        """The first thing that speaks for stopping at moment `i`, or `"go on"`."""
        causes = ("diverged", "target", "gain", "flat", "patience")
        return next((cause for cause in causes if getattr(self, cause)[i]), "go on")


def stopping_epoch(
    values: ArrayLike,
    mode: str,
    max_epochs: int | None = None,
    preset: str = "balanced",
    *,
    train_values: ArrayLike | None = None,
    min_improvement: float | None = None,
    weights: str | None = None,
) -> int | None:
    """Replay the rule over a finished curve: how many evaluations would have run.

    Use it to see what the callback would have done to runs that you already have.

    Args:
        values: The metric at each evaluation, oldest first; NaN where missing.
        mode: `"min"` if lower is better, `"max"` if higher is.
        max_epochs: Evaluations that were planned. Default: None (unknown).
        preset: `"safe"`, `"balanced"` or `"fast"`. Default: `"balanced"`.
        train_values: The training loss at the same evaluations. Default: None.
        min_improvement: Instead of a preset, as in `PredictiveStopping`. Default: None.
        weights: File of other weights. Default: None, those of the package.

    Returns:
        The number of evaluations after which the rule stops; None if it never does.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> flat = [1.0, 0.5, 0.3, 0.2] + [0.2] * 60
        >>> stopping_epoch(flat, mode="min", max_epochs=64) < 64
        True
    """
    rule = PredictiveStopping(mode, preset, min_improvement, weights=weights)
    y, train = checked(values, mode, train_values)
    stops = np.flatnonzero(rule.replay(y, train, checked_budget(max_epochs, len(y))).stop)
    return int(stops[0]) + 1 if len(stops) else None


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and low <= value <= high):
        span = f"between {low:g} and {high:g}" if math.isfinite(low) else "finite"
        raise ValueError(f"{name} must be {span}, got {value!r}")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
