"""Early stopping by forecast for Lightning."""

from __future__ import annotations

import copy
import re
from dataclasses import asdict
from typing import Any

from torch import Tensor

from lightning_ext._best_weights import copy_of_weights, require_whole_model
from lightning_ext._compat import (
    EarlyStopping,
    LightningModule,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_ext._metrics import MeanLoss, mean_over_ranks, metric, on_any_rank, require_logged
from lightning_ext._progress import Position, Remaining, limits, remaining
from lightning_ext._schedule import RateSchedule
from lightning_ext.callbacks._base import DecidingCallback
from strategies.early_stopping import Forecast, PredictiveStopping, StopDecision
from strategies.early_stopping.arguments import check_arguments
from strategies.early_stopping.modes import mode_of


class PredictiveEarlyStopping(DecidingCallback, EarlyStopping):
    """Stop when what the rest of the run would bring is not worth its time.

    After each validation the curve so far goes to a forecaster that was trained on many learning
    curves; it tells how likely a better value is, and how much better. Use it instead of
    `EarlyStopping`, whose patience waits equally long everywhere. It does not wait longer than
    needed on a curve that is done, and does not stop on one that is merely noisy, or just before
    a scheduled drop of the learning rate.

    A curve that looks like none in the training set is judged by `patience`. Every rank decides
    alike. Nothing is latched: `min_epochs` and `min_steps` are kept, and a resumed run decides as
    an uninterrupted one. With several in one trainer, the first that stops ends the run.

    Args:
        monitor: The metric, as logged in validation or, if it is not found there, at the end of
            the training epoch.
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
        wait_for_schedule: Whether not to stop while the learning rate warms up or before it drops.
            Default: True.
        restore_best: Whether to end with the weights of the best evaluation. They are kept in host
            memory and in checkpoints, which grow by the size of the model. Default: False.
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
            logged, or `restore_best` is used with a sharded model.

    Example:
        >>> from lightning_ext import PredictiveEarlyStopping
        >>> from lightning.pytorch import Trainer
        >>> stopping = PredictiveEarlyStopping("val_loss", preset="safe")
        >>> trainer = Trainer(callbacks=[stopping], logger=False, accelerator="cpu", max_epochs=100)
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
        self.stopped_epoch = 0  # what reads it of Lightning's own finds it here
        self.stopped_epoch_: int | None = None
        self.reason_: str | None = None
        self.best_: float | None = None
        self.best_epoch_: int | None = None
        self.forecast_: Forecast | None = None
        self._schedule = RateSchedule()
        self._begun: Position | None = None
        self._source = ""  # where the metric is logged: "validation" or "training"
        self._validated = False
        self._pending: float | None = None  # of a validation, until its epoch ends
        self._validating = False
        self._before_epoch: Tensor | None = None
        self._before_validation: Tensor | None = None
        self._loss = MeanLoss()
        self._told: list[str] = []
        self._best_step = 0
        self._best_weights: dict[str, Any] = {}

    def reset(self) -> None:
        super().reset()
        self._rule.reset()
        self._forget()

    @property
    def state_key(self) -> str:
        parts = {"monitor": self.monitor, "mode": self._rule.mode, "preset": self.preset}
        return f"{type(self).__qualname__}{parts}"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.restore_best:
            instead = f"ModelCheckpoint(monitor={self.monitor!r}, mode={self._rule.mode!r})"
            require_whole_model(trainer, instead)

    # What happens around an evaluation.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._begun is None:
            self._begun = Position.of(trainer, epoch_over=True)
        if self._pending is not None and not _once_an_epoch(trainer):
            mean, self._pending = self._pending, None  # saved before it was taken in
            self._evaluate(trainer, pl_module, mean, epoch_over=False)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before_epoch = trainer.callback_metrics.get(self.monitor)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._schedule.begin(trainer, len(self._rule.values))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.train_monitor is None:
            self._loss.add(trainer, outputs)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = _fitting(trainer)
        if self._validating:
            self._before_validation = trainer.callback_metrics.get(self.monitor)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = False
        if not _fitting(trainer) or self._source == "training":
            return
        self._validated = True
        value = metric(trainer, self.monitor, self._before_validation)
        if not self._source and on_any_rank(trainer, value is None):
            # It may be one of the training epoch, unless epochs are nothing to go by.
            if trainer.check_val_every_n_epoch is None:
                require_logged(trainer, self.monitor)
            return
        self._source = "validation"
        mean = self._known(trainer, value)
        if _once_an_epoch(trainer):
            # What the epoch logs counts too; until it ends, a checkpoint knows of the evaluation.
            self._pending = mean
            self._loss = MeanLoss(mean_over_ranks(trainer, self._train_value(trainer)), 1)
        else:
            self._evaluate(trainer, pl_module, mean, epoch_over=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not _fitting(trainer):
            return
        if self._pending is not None:
            mean, self._pending = self._pending, None
            self._evaluate(trainer, pl_module, mean, epoch_over=True)
        elif self._source != "validation":
            value = metric(trainer, self.monitor, self._before_epoch)
            if not self._source and on_any_rank(trainer, value is None):
                if self._validated or not trainer.enable_validation:
                    require_logged(trainer, self.monitor)
                return
            self._source = "training"
            self._evaluate(trainer, pl_module, self._known(trainer, value), epoch_over=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._best_weights and self._best_step != trainer.global_step:
            pl_module.load_state_dict(self._best_weights, strict=pl_module.strict_loading)
            best = self.best_epoch_ or 0
            reason = f"epoch {best + 1}: its weights are the best"
            self.record(trainer, "restore", reason, epoch=best)

    def _evaluate(
        self, trainer: Trainer, pl_module: LightningModule, value: float, epoch_over: bool
    ) -> None:
        """Put one evaluation before the rule, and do what it says."""
        now, done = Position.of(trainer, epoch_over), len(self._rule.values) + 1
        whole = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch is not None
        unit = "epoch" if whole or self._source == "training" else "step"
        rest = remaining(self._begun or now, now, limits(trainer), done, unit)
        train = mean_over_ranks(trainer, self._train_value(trainer))
        hold = self._hold(trainer, now, done if rest.evaluations is None else rest.evaluations)
        budget = None if rest.evaluations is None else done + rest.evaluations
        decision = self._rule.update(value, train, budget, hold, rest.text)
        self._loss, self.forecast_ = MeanLoss(), decision.forecast
        if decision.improved:
            self._keep_best(trainer, pl_module, value)
        stop = on_any_rank(trainer, decision.stop)
        if stop:
            trainer.should_stop = True
            self.stopped_epoch = self.stopped_epoch_ = trainer.current_epoch
        self._explain(trainer, decision, stop, rest)

    def _hold(self, trainer: Trainer, now: Position, left: int) -> str | None:
        """Why not to stop yet."""
        if trainer.current_epoch < self.start_from_epoch:
            return f"start_from_epoch is {self.start_from_epoch}"
        # Lightning would remember a wish to stop until these are met.
        if now.finished < (trainer.min_epochs or 0):
            return f"min_epochs is {trainer.min_epochs}"
        if now.steps < (trainer.min_steps or 0):
            return f"min_steps is {trainer.min_steps}"
        if self.wait_for_schedule:
            return self._schedule.reason_to_wait(trainer, left, self._source == "training")
        return None

    def _keep_best(self, trainer: Trainer, pl_module: LightningModule, value: float) -> None:
        self.best_, self.best_epoch_ = value, trainer.current_epoch
        self._best_step = trainer.global_step
        if self.restore_best:
            self._best_weights = copy_of_weights(pl_module)

    # What people get to see of it.

    def _explain(
        self,
        trainer: Trainer,
        decision: StopDecision,
        stop: bool,
        rest: Remaining,
    ) -> None:
        reason, seen = f"{rest.when}: {decision.reason}", decision.forecast
        numbers: dict[str, float] = {"epoch": trainer.current_epoch}
        if rest.saved:
            numbers["saved"] = rest.saved
        if seen is not None:
            numbers["p_improve"] = seen.p_improve
            numbers["expected_improvement"] = seen.expected_improvement
            self._log_forecast(trainer, seen, decision)
        if seen is not None and not seen.in_distribution and self._first("fall back"):
            self.record(trainer, "fall back", reason, **numbers)
        # A drop that comes nearer is the same reason, however far away it is.
        why = re.split("[0-9]", decision.reason.rpartition("held, as ")[2])[0]
        if decision.held and self._first(f"hold: {why}"):
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

    def _log_forecast(self, trainer: Trainer, seen: Forecast, decision: StopDecision) -> None:
        named = {"p_improve": seen.p_improve, "expected_best": decision.expected_best}
        metrics = {f"{self.monitor}_{name}": value for name, value in named.items()}
        metrics["epoch"] = trainer.current_epoch
        for logger in trainer.loggers if self.log_forecast else ():
            logger.log_metrics(metrics, step=trainer.global_step)

    def _first(self, what: str) -> bool:
        """Whether this is the first time in the run."""
        first = what not in self._told
        self._told += [what] * first
        return first

    # Where the numbers come from.

    def _known(self, trainer: Trainer, value: Tensor | None) -> float:
        """The mean over ranks of a metric that was logged before."""
        if value is None and self._first("missing"):
            rank_zero_warn(
                f"{type(self).__name__}: {self.monitor!r} is not logged in every {self._source}; "
                "such evaluations count as missing"
            )
        return mean_over_ranks(trainer, value)

    def _train_value(self, trainer: Trainer) -> Any:
        if self.train_monitor is None:
            return self._loss.value
        return trainer.callback_metrics.get(self.train_monitor)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "rule": self._rule.state_dict(),
            "rates": self._schedule.state_dict(),
            "begun": self._begun and asdict(self._begun),
            "source": self._source,
            "pending": self._pending,
            "loss": self._loss.state_dict(),
            "told": list(self._told),
            "best": [self.best_, self.best_epoch_, self._best_step],
            "weights": self._best_weights,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._rule.load_state_dict(state_dict["rule"])
        self._schedule.load_state_dict(state_dict["rates"])
        self._begun = state_dict["begun"] and Position(**state_dict["begun"])
        self._source, self._pending = state_dict["source"], state_dict["pending"]
        self._loss, self._told = MeanLoss(*state_dict["loss"]), list(state_dict["told"])
        self.best_, self.best_epoch_, self._best_step = state_dict["best"]
        self._best_weights = dict(state_dict["weights"]) if self.restore_best else {}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Another callback saves as a validation ends, before this one's turn: a resumed run does
        # not repeat that validation.
        if self._validating and self._source != "training":
            value = metric(trainer, self.monitor, self._before_validation)
            if value is not None:
                state = checkpoint["callbacks"][self.state_key]
                state.update(pending=float(value), source="validation")

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # A run that goes on with another preset keeps its history.
        states = checkpoint.get("callbacks", {})
        mine = self.state_key.partition(", 'preset'")[0]
        other = next((key for key in states if str(key).startswith(mine)), None)
        if other is not None and self.state_key not in states:
            self.load_state_dict(copy.deepcopy(states[other]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_before_epoch": None, "_before_validation": None}


def _fitting(trainer: Trainer) -> bool:
    idle = trainer.sanity_checking or getattr(trainer, "fast_dev_run", False)
    return trainer.state.fn == "fit" and not idle


def _once_an_epoch(trainer: Trainer) -> bool:
    return trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
