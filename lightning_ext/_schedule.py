"""The learning rate at each evaluation: what it was, and what the schedulers will make of it."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any

from lightning_ext._compat import Trainer
from strategies.early_stopping.schedule import may_drop, reason_to_wait

# Moments looked ahead to at once: half a second of work for a scheduler that steps at each.
_FAR = 100_000

_log = logging.getLogger(__name__)


class RateSchedule:
    """Remembers the rates of a run and runs copies of its schedulers ahead.

    An evaluation counts with the rate at which the training before it began, so a rate that drops
    right after an evaluation is still to come.

    Attributes:
        past: Rates of all parameter groups, by evaluation.
    """

    def __init__(self) -> None:
        self.past: list[list[float]] = []
        self._ahead: list[list[float]] = []
        self._enough = 0

    def begin(self, trainer: Trainer, done: int) -> None:
        """Note the rates at the first batch after an evaluation.

        Args:
            trainer: The running trainer.
            done: Evaluations so far.
        """
        if len(self.past) <= done:
            self.past.append(rates_now(trainer))

    def reason_to_wait(self, trainer: Trainer, left: int, at_epoch_end: bool) -> str | None:
        """Why not to stop after the present evaluation, if there is a reason.

        Args:
            trainer: The running trainer.
            left: Evaluations to come.
            at_epoch_end: Whether they come at the end of each epoch, whatever the validation.
        """
        now = rates_now(trainer)
        past = [row for row in self.past if len(row) == len(now)]
        if not (left and past and trainer.lr_scheduler_configs):
            return None
        if reason := _plateau(trainer, [max(column) for column in zip(*past, now, strict=True)]):
            return reason
        ahead = self._rates_ahead(trainer, now, left, at_epoch_end)
        columns = zip(zip(*past, strict=True), zip(*ahead, strict=True), strict=False)
        reasons = (reason_to_wait(before, after) for before, after in dict.fromkeys(columns))
        return next(filter(None, reasons), None)

    def _rates_ahead(
        self, trainer: Trainer, now: list[float], left: int, at_epoch_end: bool
    ) -> list[list[float]]:
        """What was foreseen after the evaluation before, as long as it comes true."""
        self._ahead = self._ahead[1:]
        if self._ahead[:1] != [now] or len(self._ahead) < min(left, self._enough):
            self._ahead = rates_ahead(trainer, left, len(self.past), at_epoch_end)
            self._enough = len(self._ahead) // 2  # what is very far ahead can wait
        return self._ahead[:left]

    def state_dict(self) -> list[list[float]]:
        """The rates so far, as plain values."""
        return [list(row) for row in self.past]

    def load_state_dict(self, state: list[list[float]]) -> None:
        """Take over what `state_dict` returned."""
        self.past, self._ahead = [list(row) for row in state], []


def rates_now(trainer: Trainer) -> list[float]:
    """The learning rate of each parameter group of each optimizer.

    Args:
        trainer: The running trainer.
    """
    return [float(group["lr"]) for o in trainer.optimizers for group in o.param_groups]


def rates_ahead(
    trainer: Trainer, left: int, done: int, at_epoch_end: bool = False
) -> list[list[float]]:
    """The rates with which training towards each evaluation to come will begin.

    Args:
        trainer: A trainer right after an evaluation.
        left: Evaluations to come.
        done: Evaluations so far, the present one included.
        at_epoch_end: Whether they come at the end of each epoch, whatever the validation.

    Returns:
        One row for each evaluation, at most `left`; fewer where that is very far ahead, none where
        the module steps its schedulers itself or a scheduler cannot be copied.
    """
    rows: list[list[float]] = []
    try:
        with warnings.catch_warnings():  # of schedulers about the order of steps
            warnings.simplefilter("ignore")
            for row in itertools.islice(_rows(trainer, done, at_epoch_end), left):
                rows.append(row)
    except Exception as error:  # user's code, such as a scheduler that ends before training does
        _log.debug("learning rates are foreseen for %d evaluations: %r", len(rows), error)
    return rows


def _rows(trainer: Trainer, done: int, at_epoch_end: bool) -> Iterator[list[float]]:
    module = trainer.lightning_module
    # By name, for Lightning has two packages.
    own_steps = type(module).lr_scheduler_step.__qualname__ != "LightningModule.lr_scheduler_step"
    if own_steps or not module.automatic_optimization:
        return
    stand_ins, copies = _copies(trainer)
    stepwise = any(config.interval == "step" for config, _ in copies)
    yield [float(group["lr"]) for o in stand_ins for group in o.param_groups]
    for epoch, batch, last, evaluated in _moments(trainer, done, at_epoch_end, stepwise):
        accumulated = last or batch % trainer.accumulate_grad_batches == 0
        for config, scheduler in copies:
            reached = accumulated if config.interval == "step" else last
            count = batch if config.interval == "step" else epoch + 1
            if reached and count % config.frequency == 0:
                scheduler.step()
        if evaluated:
            yield [float(group["lr"]) for o in stand_ins for group in o.param_groups]


def _moments(
    trainer: Trainer, done: int, at_epoch_end: bool, stepwise: bool
) -> Iterator[tuple[int, int, bool, bool]]:
    """Batches to come at which something happens.

    Yields:
        Epoch (from 0), batch (from 1), whether it is the last one, and whether it is evaluated.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    epoch, batch, total = trainer.current_epoch, progress.current.ready, progress.total.ready
    length: float = trainer.num_training_batches
    if progress.is_last_batch:
        length = batch
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if at_epoch_end:
        every, epochs = length, 1
    elif every is None:  # validation by the clock
        every, epochs = max(round(total / done), 1), None
    every = min(every, math.inf if epochs is None else length)
    for _ in range(_FAR):
        if batch >= length:
            epoch, batch = epoch + 1, 0
        until_check = every - (total if epochs is None else batch) % every
        jump = 1 if stepwise else min(until_check, length - batch)
        if math.isinf(jump):
            return
        batch, total = batch + int(jump), total + int(jump)
        evaluated = jump == until_check or until_check == 1
        if epochs is not None:
            evaluated &= (epoch + 1) % epochs == 0
        yield epoch, batch, batch == length, evaluated


class _StandIn:
    """Takes the place of an optimizer in a copied scheduler: its groups without parameters."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [
            {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": []}
            for group in optimizer.param_groups
        ]
        self.defaults = dict(optimizer.defaults)
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        """Do nothing; schedulers look at their optimizer's `step`."""


def _copies(trainer: Trainer) -> tuple[list[_StandIn], list[tuple[Any, Any]]]:
    """Stand-ins of all optimizers, and copies of the schedulers that act on those."""
    stand_ins = [_StandIn(optimizer) for optimizer in trainer.optimizers]
    module = trainer.lightning_module
    # A rule for the rate may be a method of the module: what it belongs to is not copied.
    shared = [
        trainer,
        getattr(trainer, "datamodule", None),
        *module.modules(),
        *module.parameters(),
    ]
    memo: dict[int, Any] = {id(kept): kept for kept in shared}
    memo |= {id(o): s for o, s in zip(trainer.optimizers, stand_ins, strict=True)}
    configs = [c for c in trainer.lr_scheduler_configs if not c.reduce_on_plateau]
    for config in configs:
        if not isinstance(memo.get(id(config.scheduler.optimizer)), _StandIn):
            raise TypeError(f"{config.scheduler!r} acts on an optimizer that is not the trainer's")
    return stand_ins, [(config, copy.deepcopy(config.scheduler, memo)) for config in configs]


def _plateau(trainer: Trainer, peaks: list[float]) -> str | None:
    """Whether a scheduler that waits for a plateau can still lower a rate noticeably."""
    groups = [group for o in trainer.optimizers for group in o.param_groups]
    peak_of = {id(group): peak for group, peak in zip(groups, peaks, strict=True)}
    for config in trainer.lr_scheduler_configs:
        if not config.reduce_on_plateau:
            continue
        scheduler: Any = config.scheduler
        for group, lowest in zip(scheduler.optimizer.param_groups, scheduler.min_lrs, strict=False):
            now = float(group["lr"])
            peak, noticed = peak_of.get(id(group), now), now - scheduler.eps
            if may_drop(now, scheduler.factor, lowest, peak) and (
                max(now * scheduler.factor, lowest) < noticed
            ):
                return f"{type(scheduler).__name__} may still lower the learning rate"
    return None
