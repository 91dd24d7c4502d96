"""Early stopping by forecast for Lightning."""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import asdict
from typing import Any

import torch

from lightning_ext._best_weights import copy_of_weights, require_whole_model
from lightning_ext._compat import (
    EarlyStopping,
    LightningModule,
    Trainer,
    logged_at,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_ext._metrics import on_any_rank
from lightning_ext._monitor import Monitor
from lightning_ext._progress import (
    Position,
    Remaining,
    by_epochs,
    fitting,
    limits,
    once_an_epoch,
    remaining,
)
from lightning_ext._schedule import RateSchedule
from lightning_ext.callbacks._base import DecidingCallback
from strategies.early_stopping import Forecast, PredictiveStopping, StopDecision
from strategies.early_stopping.arguments import check_arguments
from strategies.early_stopping.modes import mode_of

# What tells instances on the same metric apart; the rest of the arguments decides nothing.
_NOT_IN_KEY = ("monitor", "mode", "preset", "restore_best", "log_forecast", "verbose")


class PredictiveEarlyStopping(DecidingCallback, EarlyStopping):
    """Stop when what the rest of the run would bring is not worth its time.

    After each validation the curve so far goes to a forecaster that was trained on many learning
    curves; it tells how likely a better value is, and how much better. Use it instead of
    `EarlyStopping`, whose patience waits equally long everywhere. It does not wait longer than
    needed on a curve that is done, and does not stop on one that is merely noisy, or just before
    a scheduled drop of the learning rate.

    It stops when too little gain is to be expected, when `target` has become unlikely, when the
    metric does not change any more, and when it was NaN three times in a row; a curve that looks
    like none in the training set is judged by `patience`. Every rank decides alike. Nothing is
    latched: `min_epochs` and `min_steps` are kept, and a resumed run decides as an uninterrupted
    one, unless its checkpoint was written upon an exception on several ranks. With several in one
    trainer, the first that stops ends the run.

    Args:
        monitor: The metric, as logged in validation or, if it is not found there, at the end of
            the training epoch. Where it is not logged, there is no evaluation.
        mode: `"min"`, `"max"`, or `"auto"` to go by the name. Default: `"auto"`.
        preset: `"safe"`, `"balanced"` or `"fast"`: what the time saved is worth. Default:
            `"balanced"`.
        min_improvement: Instead of a preset: stop when less is expected than this, as a share of
            the range seen so far. Default: None.
        horizon: Look only so many evaluations ahead. Default: None, to the end of the run.
        target: A value to beat; stop when that has become unlikely. Default: None.
        p_target: The chance of beating `target` below which to stop. Default: 0.05.
        patience: Evaluations without a better value after which to stop a curve that cannot be
            forecast. Default: 20.
        weights: File of a forecaster of your own, as `python -m strategies.early_stopping.train`
            writes it. Default: None, the one of the package.
        train_monitor: Logged training loss to look at beside the metric. Default: None, the mean
            of what `training_step` returned since the evaluation before.
        start_from_epoch: Epochs to let pass before stopping is considered. Default: 0.
        wait_for_schedule: Whether not to stop while the learning rate warms up or before it drops,
            unless the run has diverged. Default: True.
        restore_best: Whether to end with the weights of the best evaluation. They are kept in host
            memory and in checkpoints, which grow by the size of the model. Not beside a callback
            that averages weights (SWA, EMA). Default: False.
        log_forecast: Whether to log `"<monitor>_p_improve"` and `"<monitor>_expected_best"`.
            Default: False.
        verbose: Whether to print why the run stops. Default: True.

    Attributes:
        stopped_epoch_: Epoch in which it stopped the run, as `trainer.current_epoch` counts; None
            if it did not.
        best_: Best value so far, or None.
        best_epoch_: Epoch of the best value, or None.
        reason_: Why it stopped the run; None if it did not.
        forecast_: The last forecast; None before the third evaluation.
        decisions_: What was decided, when and why.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, `mode="auto"` cannot tell, the metric is not
            logged, or `restore_best` is used with a sharded model or averaged weights.

    Example:
        >>> from lightning_ext import PredictiveEarlyStopping
        >>> from lightning.pytorch import Trainer
        >>> stopping = PredictiveEarlyStopping("val_loss", preset="safe")
        >>> trainer = Trainer(callbacks=[stopping], logger=False, accelerator="cpu", max_epochs=100)
    """

    min_delta = 0.0  # for those who read it, as the other attributes of Lightning's own

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
    ) -> None:
        super().__init__()
        self.monitor, self.mode, self.preset = monitor, mode, preset
        self.min_improvement, self.horizon = min_improvement, horizon
        self.target, self.p_target, self.patience = target, p_target, patience
        self.weights = weights
        self.train_monitor, self.start_from_epoch = train_monitor, start_from_epoch
        self.wait_for_schedule, self.restore_best = wait_for_schedule, restore_best
        self.log_forecast, self.verbose = log_forecast, verbose
        check_arguments(self)
        self._rule = PredictiveStopping(
            mode_of(monitor, mode), preset, min_improvement, horizon, target, p_target, patience,
            weights,
        )  # fmt: skip
        self._forget()

    def _forget(self) -> None:
        self.stopped_epoch = self.wait_count = 0
        self.stopped_epoch_: int | None = None
        self.reason_: str | None = None
        self.best_: float | None = None
        self.best_epoch_: int | None = None
        self.forecast_: Forecast | None = None
        self._schedule = RateSchedule()
        self._monitor = Monitor(self.monitor, self.train_monitor)
        self._begun: Position | None = None
        self._first: Position | None = None  # evaluation
        self._told: list[str] = []
        self._best_step = 0
        self._best_weights: dict[str, Any] = {}
        self._show_best()

    def _show_best(self) -> None:
        """Set what Lightning's own has, and others may read."""
        values, worst = self._rule.values, math.inf if self._rule.mode == "min" else -math.inf
        self.best_score = torch.tensor(worst if self.best_ is None else self.best_)
        found = -1 if self.best_ is None else values.index(self.best_)
        self.wait_count = len(values) - 1 - found

    def reset(self) -> None:
        super().reset()
        self._rule.reset()
        self._forget()

    @property
    def state_key(self) -> str:
        parts: dict[str, Any] = {"monitor": self.monitor, "mode": self._rule.mode}
        parts["preset"] = self.preset
        for p in inspect.signature(PredictiveEarlyStopping).parameters.values():
            if p.name not in _NOT_IN_KEY and getattr(self, p.name) != p.default:
                parts[p.name] = getattr(self, p.name)
        return f"{type(self).__qualname__}{parts}"

    @property
    def monitor_op(self) -> Any:
        return self.mode_dict[self._rule.mode]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.restore_best:
            instead = f"ModelCheckpoint(monitor={self.monitor!r}, mode={self._rule.mode!r})"
            require_whole_model(trainer, instead)

    # What happens around an evaluation.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._begun is None:
            self._begun = Position.of(trainer, epoch_over=True)
        self._monitor.train_starts(trainer)
        if self._monitor.pending is not None and not once_an_epoch(trainer):
            # It was saved before it was taken in.
            self._evaluate(trainer, pl_module, self._monitor.pending, epoch_over=False)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitor.starts(trainer, "training")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._schedule.begin(trainer, len(self._rule.values))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._monitor.batch_ends(trainer, outputs)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if fitting(trainer):
            self._monitor.starts(trainer, "validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not fitting(trainer) or self._monitor.source == "training":
            return
        value = self._monitor.validation_ends(trainer)
        if value is not None and once_an_epoch(trainer):
            self._monitor.wait_for_epoch(trainer, value)
        elif value is not None:
            self._evaluate(trainer, pl_module, value, epoch_over=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not fitting(trainer):
            return
        value = self._monitor.pending
        if self._monitor.source != "validation":
            value = self._monitor.epoch_ends(trainer)
        if value is not None:
            self._evaluate(trainer, pl_module, value, epoch_over=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.restore_best or self.best_epoch_ is None:
            return
        best = self.best_epoch_
        if self._best_step == trainer.global_step:
            return
        if not self._best_weights:
            rank_zero_warn(
                f"{type(self).__name__}: the model keeps its last weights, as those of the best "
                f"epoch, {best + 1}, come from a run without restore_best=True"
            )
            return
        pl_module.load_state_dict(self._best_weights, strict=pl_module.strict_loading)
        self.record(trainer, "restore", f"epoch {best + 1}: its weights are the best", epoch=best)

    def _evaluate(
        self, trainer: Trainer, pl_module: LightningModule, value: float, epoch_over: bool
    ) -> None:
        """Put one evaluation before the rule, and do what it says."""
        now, done = Position.of(trainer, epoch_over), len(self._rule.values) + 1
        monitor, at_epoch_end = self._monitor, self._monitor.source == "training"
        unit = "epoch" if at_epoch_end or by_epochs(trainer) else "step"
        since, times = self._begun or now, done
        if self._first and not math.isnan(self._first.epochs):
            since, times = self._first, done - 1  # the metric has a rhythm of its own
        rest = remaining(since, now, limits(trainer), times, unit)
        every = monitor.chances if self._first else 1
        self._first, monitor.pending = self._first or now, None
        train = monitor.train_value(trainer, epoch_over)
        budget = None if rest.evaluations is None else done + rest.evaluations
        wait = None
        if self.wait_for_schedule:
            wait = self._schedule.reason_to_wait(trainer, rest, at_epoch_end, every)
        hold = self._hold(trainer, now)
        decision = self._rule.update(value, train, budget, hold=hold, wait=wait, left=rest.text)
        self.forecast_ = decision.forecast
        if decision.improved:
            self._keep_best(trainer, pl_module, value)
        self._show_best()
        stop = on_any_rank(trainer, decision.stop)
        if stop:
            trainer.should_stop = True
            self.stopped_epoch = self.stopped_epoch_ = trainer.current_epoch
        self._explain(trainer, decision, stop, rest, logged_at(trainer, epoch_over))

    def _hold(self, trainer: Trainer, now: Position) -> str | None:
        """Why not to stop yet, whatever happens."""
        if trainer.current_epoch < self.start_from_epoch:
            return f"start_from_epoch is {self.start_from_epoch}"
        # Lightning would remember a wish to stop until these are met.
        if now.finished < (trainer.min_epochs or 0):
            return f"min_epochs is {trainer.min_epochs}"
        if now.steps < (trainer.min_steps or 0):
            return f"min_steps is {trainer.min_steps}"
        return None

    def _keep_best(self, trainer: Trainer, pl_module: LightningModule, value: float) -> None:
        self.best_, self.best_epoch_ = value, trainer.current_epoch
        self._best_step = trainer.global_step
        if self.restore_best:
            self._best_weights = copy_of_weights(pl_module)

    # What people get to see of it.

    def _explain(
        self, trainer: Trainer, decision: StopDecision, stop: bool, rest: Remaining, step: int
    ) -> None:
        reason, seen = f"{rest.when}: {decision.reason}", decision.forecast
        numbers: dict[str, float] = {"epoch": trainer.current_epoch}
        if rest.saved:
            numbers["saved"] = rest.saved
        if seen is not None:
            numbers["p_improve"] = seen.p_improve
            numbers["expected_improvement"] = seen.expected_improvement
            self._log_forecast(trainer, seen, decision, step)
        if seen is not None and not seen.in_distribution and self._new("fall back"):
            self.record(trainer, "fall back", reason, **numbers)
        if decision.held and self._new(f"hold: {decision.held}"):
            self.record(trainer, "hold", reason, **numbers)
        if stop:
            self.reason_ = reason
            self.record(trainer, "stop", reason, **numbers)
            if self.verbose:
                rank_zero_info(f"{type(self).__name__}: {reason}")
        if decision.cause == "patience":
            rank_zero_warn(
                f"{type(self).__name__}: {reason}; choose patience to suit, or leave such curves "
                "to EarlyStopping"
            )

    def _log_forecast(
        self, trainer: Trainer, seen: Forecast, decision: StopDecision, step: int
    ) -> None:
        named = {"p_improve": seen.p_improve, "expected_best": decision.expected_best}
        metrics = {f"{self.monitor}_{name}": value for name, value in named.items()}
        metrics["epoch"] = trainer.current_epoch
        for logger in trainer.loggers if self.log_forecast else ():
            logger.log_metrics(metrics, step=step)

    def _new(self, what: str) -> bool:
        """Whether this is the first time in the run."""
        first = what not in self._told
        self._told += [what] * first
        return first

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "rule": self._rule.state_dict(),
            "rates": self._schedule.state_dict(),
            "begun": [p and asdict(p) for p in (self._begun, self._first)],
            "monitor": self._monitor.state_dict(),
            "told": list(self._told),
            "best": [self.best_, self.best_epoch_, self._best_step],
            "weights": self._best_weights,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._rule.load_state_dict(state_dict["rule"])
        self._schedule.load_state_dict(state_dict["rates"])
        self._begun, self._first = (p and Position(**p) for p in state_dict["begun"])
        self._monitor.load_state_dict(state_dict["monitor"])
        self._told = list(state_dict["told"])
        self.best_, self.best_epoch_, self._best_step = state_dict["best"]
        self._best_weights = dict(state_dict["weights"]) if self.restore_best else {}
        self._show_best()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = checkpoint["callbacks"][self.state_key]
        state["monitor"] = self._monitor.state_of_ranks(trainer)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # A run that goes on with another preset keeps its history.
        states = checkpoint.get("callbacks", {})
        mine = self.state_key.partition(", 'preset'")[0]
        other = next((key for key in states if str(key).startswith(mine)), None)
        if other is not None and self.state_key not in states:
            self.load_state_dict(copy.deepcopy(states[other]))
