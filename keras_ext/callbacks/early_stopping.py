"""Early stopping that forecasts the learning curve, for any Keras model."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_ext._evaluations import Evaluations, with_nan, without_nan
from keras_ext._logs import names, number
from keras_ext._schedule import RateWatch
from keras_ext._state_file import StateFile
from keras_ext.backends.internals import siblings
from keras_ext.backends.ranks import is_first_rank
from keras_ext.callbacks._base import DecidingCallback
from strategies.early_stopping import Forecast, PredictiveStopping, StopDecision
from strategies.early_stopping.arguments import check_arguments
from strategies.early_stopping.modes import mode_of

_PATIENT = 10  # epochs without any validation metric before it looks like a mistake


class PredictiveEarlyStopping(DecidingCallback):
    """Stop training when the epochs that are left will hardly improve a metric any more.

    After each evaluation it forecasts from the curve so far how much better the best value will
    still get by the end of the fit, and stops when that is not worth the epochs. It does not stop
    just before the learning rate drops, if that is known ahead: from a schedule in the optimizer,
    from `LearningRateScheduler` or from `ReduceLROnPlateau`.

    Use it in place of `EarlyStopping` wherever `fit` has a fixed number of epochs and a metric on
    data that the model is not trained on.

    Args:
        monitor: Name of the metric in `logs`, such as `"val_loss"`. An epoch without it, as
            `validation_freq=5` makes them, is no evaluation.
        mode: `"min"` if lower is better, `"max"` if higher is, `"auto"` to go by the name.
            Default: `"auto"`.
        preset: How readily to stop: `"safe"`, `"balanced"` or `"fast"`. Default: `"balanced"`.
        min_improvement: Instead of a preset: stop when less improvement than this is expected, as
            a share of the range seen so far. Default: None.
        horizon: How many evaluations to look ahead. Default: None, to the last epoch.
        target: A value to beat; stop when that has become unlikely. Default: None.
        p_target: The chance of beating `target` below which to stop. Default: 0.05.
        patience: Evaluations without a better value after which to stop where the curve looks
            like none that the forecast was trained on. Default: 20.
        weights: File of a forecaster of your own, as `python -m strategies.early_stopping.train`
            writes it. Default: None, the one of the package.
        train_monitor: Name of the training loss, which helps the forecast. Default: None, which
            takes `"loss"` where there is one.
        start_from_epoch: Epochs to let pass before stopping is considered. Default: 0.
        wait_for_schedule: Whether to go on while the learning rate still rises or is about to
            drop. To know, it asks `LearningRateScheduler` functions ahead: what such a function
            does to global variables happens more often. Default: True.
        restore_best: Whether to give the model the weights of its best evaluation when the fit
            ends, stopped or not. The optimizer stays as it is. Default: False.
        log_forecast: Whether to put `<monitor>_p_improve` and `<monitor>_expected_best` into
            `logs` at each evaluation, NaN before there is a forecast; callbacks that come later
            in the list see them, and `History` does. Default: False.
        verbose: Whether to print why the fit was stopped, unless the fit is silent. Default: True.
        state_path: Local JSON file that keeps the history, and beside it the best weights if
            `restore_best`, for a fit that goes on from an epoch other than 0, by `initial_epoch`
            or `BackupAndRestore`; all processes have to see it. Keras saves no state of callbacks,
            so without it such a fit begins with an empty history. Default: None.

    Attributes:
        stopped_epoch_: Epoch, counted from 0, after which the last fit was stopped, or None.
        best_: Best value so far, or None.
        best_epoch_: Epoch of the best value, counted from 0, or None. Negative for one from
            before `load_state_dict`, if the next fit counted from 0 again.
        reason_: Why it was stopped, or None.
        forecast_: What was expected at the last evaluation; None before the third.
        decisions_: What was decided in the last fit.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, or `mode="auto"` cannot tell; during the fit,
            if `logs` lacks the metric, or `state_path` holds something else.

    With several processes, those of `keras.distribution` see the same metrics and decide alike.
    Where each runs `fit` by itself, as with torch's `DistributedDataParallel`, average the metric
    over the processes first, in a callback that comes earlier in the list.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x, y = np.ones((8, 2)), np.ones((8, 1))
        >>> stopping = PredictiveEarlyStopping("val_loss", preset="fast", restore_best=True)
        >>> history = model.fit(
        ...     x, y, validation_data=(x, y), epochs=4, callbacks=[stopping], verbose=0)
        >>> stopping.best_ == min(history.history["val_loss"])
        True
    """

    def __init__(
        self,
        monitor: str,
        mode: str = "auto",
        preset: str = "balanced",
        min_improvement: float | None = None,
        horizon: int | None = None,
        target: float | None = None,
        p_target: float = 0.05,
        patience: int = 20,
        weights: str | None = None,
        train_monitor: str | None = None,
        start_from_epoch: int = 0,
        wait_for_schedule: bool = True,
        restore_best: bool = False,
        log_forecast: bool = False,
        verbose: bool = True,
        state_path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.monitor, self.mode, self.preset = monitor, mode, preset
        self.min_improvement, self.horizon = min_improvement, horizon
        self.target, self.p_target, self.patience = target, p_target, patience
        self.weights = weights
        self.train_monitor, self.start_from_epoch = train_monitor, start_from_epoch
        self.wait_for_schedule, self.restore_best = wait_for_schedule, restore_best
        self.log_forecast, self.verbose = log_forecast, verbose
        if not isinstance(state_path, str | os.PathLike | None):
            raise TypeError(f"state_path must be the path of a file or None, got {state_path!r}")
        self.state_path = None if state_path is None else os.fspath(state_path)
        check_arguments(self)
        self._rule = PredictiveStopping(
            mode_of(monitor, mode), preset, min_improvement, horizon, target, p_target, patience,
            weights,
        )  # fmt: skip
        self._file = None if self.state_path is None else StateFile(self.state_path)
        self._forget()

    def _forget(self) -> None:
        self._rule.reset()
        self._evaluations = Evaluations()
        self._begin()

    def _begin(self) -> None:
        """Set back what belongs to one fit."""
        self._rates = RateWatch()
        self._best_weights: list[np.ndarray] | None = None
        self._under_way = self._seen = False
        self._without = 0  # epochs before the first evaluation
        self._last = -1  # epoch that has ended
        self.stopped_epoch_: int | None = None
        self.reason_: str | None = None
        self.forecast_: Forecast | None = None

    @property
    def best_epoch_(self) -> int | None:
        """Epoch of the best value, counted from 0."""
        bests = self._evaluations.bests
        return bests[-1] if bests else None

    @property
    def best_(self) -> float | None:
        """Best value so far."""
        best, epochs = self.best_epoch_, self._evaluations.epochs
        return None if best is None else self._rule.values[epochs.index(best)]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        others = siblings()
        if sum(other is self for other in others) > 1:
            raise ValueError(f"{self!r} is in callbacks=[...] twice; pass it once")
        if not self._restored:
            self._forget()
        self._begin()
        self._loaded = self._restored
        super().on_train_begin(logs)
        self._rates = RateWatch(others)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._under_way:
            return
        self._under_way = True
        # Only now is it known: BackupAndRestore sets the first epoch as the fit begins.
        file = self._file
        if file is not None:
            file.clear() if epoch == 0 else self._read(file, epoch)
        elif epoch > 0 and not self._loaded:
            warnings.warn(
                f"PredictiveEarlyStopping: the fit begins at epoch {epoch + 1}, and the history of "
                "the epochs before it is not known; to go on with it pass state_path= in both fits",
                stacklevel=2,
            )
        if not self._loaded:
            self._evaluations.first = epoch
        elif epoch > 0:
            self._cut(epoch)
        elif self._evaluations.epochs:
            self._evaluations.move(-1 - self._evaluations.epochs[-1])
        best = self.best_epoch_
        if file is not None and self.restore_best and best is not None:
            self._best_weights = file.read_weights(best, self.model.get_weights())

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # To look at `self.model` later in an epoch would cost JAX a copy of all state.
        if batch == 0 and self.wait_for_schedule:
            self._rates.epoch_begins(self.model.optimizer)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs, rate = {} if logs is None else logs, math.nan
        self._last = epoch
        if self.wait_for_schedule:
            rate = self._rates.epoch_ends(self.model.optimizer, epoch, self._epochs)
        if self.monitor not in logs:
            self._miss(logs)
        else:
            self._seen = True
            decision = self._decide(epoch, rate, logs)
            if self.log_forecast:
                p_improve = math.nan if self.forecast_ is None else self.forecast_.p_improve
                known = {"p_improve": p_improve, "expected_best": decision.expected_best}
                logs.update({f"{self.monitor}_{name}": value for name, value in known.items()})
        if self._file is not None and is_first_rank():
            if self._best_weights is not None and self.best_epoch_ == epoch:
                self._file.write_weights(epoch, self._best_weights)
            self._file.write(
                {"monitor": self.monitor, "mode": self._rule.mode, **self.state_dict()}
            )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        speak = self.verbose and (self.params or {}).get("verbose", 0) != 0 and is_first_rank()
        if speak and self.reason_ is not None:
            print(f"Early stopping at {self.reason_}")
        if self.restore_best and self._under_way and self.best_epoch_ is not None:
            self._restore(self.best_epoch_)
        super().on_train_end(logs)

    def _decide(self, epoch: int, rate: float, logs: dict[str, Any]) -> StopDecision:
        evaluations, epochs = self._evaluations, self._epochs
        value, train_value = number("monitor", self.monitor, logs), self._train_value(logs)
        evaluations.epochs.append(epoch)
        evaluations.rates.append(rate)
        left = 0 if epochs is None else max(0, epochs - 1 - epoch)
        early = epoch < self.start_from_epoch
        decision = self._rule.update(
            value,
            train_value,
            evaluations.planned(epochs),
            hold=f"start_from_epoch is {self.start_from_epoch}" if early else None,
            wait=self._wait(epoch),
            left=f"{left} epoch{'s' * (left > 1)}" if left else None,
        )
        self.forecast_ = decision.forecast
        if decision.improved:
            evaluations.bests.append(epoch)
            if self.restore_best:
                self._best_weights = self.model.get_weights()
        self._tell(epoch, decision, left)
        evaluations.held.append(decision.held)
        return decision

    def _tell(self, epoch: int, decision: StopDecision, left: int) -> None:
        known = decision.forecast
        numbers: dict[str, float] = {"epoch": epoch}
        if left:
            numbers["saved"] = left
        if known is not None:
            numbers["p_improve"] = known.p_improve
            numbers["expected_improvement"] = known.expected_improvement
        reason = f"epoch {epoch + 1}: {decision.reason}"
        actions = {d.action for d in self.decisions_}
        if known is not None and not known.in_distribution and "fall back" not in actions:
            self._record("fall back", reason, numbers)
        if decision.held and decision.held not in self._evaluations.held:
            self._record("hold", reason, numbers)
        if decision.stop:
            self.stopped_epoch_, self.reason_ = epoch, reason
            self.model.stop_training = True
            self._record("stop", reason, numbers)
            if decision.cause == "patience":
                warnings.warn(
                    f"PredictiveEarlyStopping: {reason}; choose patience to suit, or leave such "
                    "curves to keras.callbacks.EarlyStopping",
                    stacklevel=2,
                )

    def _record(self, action: str, reason: str, numbers: Mapping[str, float]) -> None:
        optimizer = self.model.optimizer
        steps = 0 if optimizer is None else int(keras.ops.convert_to_numpy(optimizer.iterations))
        self.decisions_.record(steps, action, reason, **numbers)

    @property
    def _epochs(self) -> int | None:
        return (self.params or {}).get("epochs")

    def _wait(self, epoch: int) -> str | None:
        if not self.wait_for_schedule:
            return None
        evaluations = self._evaluations
        return self._rates.reason_to_wait(evaluations.rates, epoch, evaluations.every)

    def _miss(self, logs: dict[str, Any]) -> None:
        if self._seen:
            return
        # With validation_freq, epochs without any validation come first.
        if not self.monitor.startswith("val_") or any(name.startswith("val_") for name in logs):
            number("monitor", self.monitor, logs)
        self._without += 1
        if self._without == _PATIENT:
            warnings.warn(
                f"PredictiveEarlyStopping: {_PATIENT} epochs without {self.monitor!r} in the logs, "
                f"which hold: {names(logs)}; pass validation_data to fit, or a smaller "
                "validation_freq",
                stacklevel=2,
            )

    def _train_value(self, logs: dict[str, Any]) -> float:
        name = self.train_monitor or "loss"
        if name == self.monitor or (name not in logs and self.train_monitor is None):
            return math.nan
        return number("train_monitor", name, logs)

    def _cut(self, epoch: int) -> None:
        """Go back to what was known as an epoch began."""
        kept = self._evaluations.cut(epoch)
        curve = self._rule.state_dict()
        self._rule.load_state_dict({name: values[:kept] for name, values in curve.items()})
        self.decisions_.load_state_dict(
            d for d in self.decisions_.state_dict() if d["numbers"].get("epoch", -1) < epoch
        )

    def _read(self, file: StateFile, epoch: int) -> None:
        state = file.read()
        if self._loaded:
            return
        if state is None:
            warnings.warn(
                f"PredictiveEarlyStopping: the fit begins at epoch {epoch + 1} and there is no "
                f"{self.state_path}, so the history is empty; pass the state_path of the fit that "
                "this one continues",
                stacklevel=2,
            )
            return
        for name, mine in (("monitor", self.monitor), ("mode", self._rule.mode)):
            if state.get(name) != mine:
                raise ValueError(
                    f"state_path={self.state_path!r} is of {name}={state.get(name)!r}, got "
                    f"{name}={mine!r}; pass another path for each callback"
                )
        try:
            self.load_state_dict(state)
        except Exception as error:
            raise file.useless(repr(error)) from error
        self._restored, self._loaded = False, True

    def _restore(self, best: int) -> None:
        if self._best_weights is None:
            warnings.warn(
                f"PredictiveEarlyStopping: the model keeps its last weights, as those of the best "
                f"epoch, {best + 1}, are of an earlier fit and not at hand; state_path keeps them",
                stacklevel=2,
            )
            return
        self.model.set_weights(self._best_weights)
        self._best_weights = None
        if best != self._last:
            self._record("restore", f"epoch {best + 1}: its weights are the best", {"epoch": best})

    def state_dict(self) -> dict[str, Any]:
        curve = {name: without_nan(values) for name, values in self._rule.state_dict().items()}
        evaluations = self._evaluations.state_dict()
        return super().state_dict() | {"curve": curve, "evaluations": evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        curve = state["curve"].items()
        self._rule.load_state_dict({name: with_nan(values) for name, values in curve})
        self._evaluations.load_state_dict(state["evaluations"])

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_rates": RateWatch(), "_best_weights": None}
