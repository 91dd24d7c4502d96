"""The learning rate at each evaluation: what it was, and what the schedulers will make of it."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from types import CellType, FunctionType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lightning_ext._compat import Trainer, isolate_rng
from lightning_ext._progress import Remaining, whole
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
        self._enough = 0.0

    def begin(self, trainer: Trainer, done: int) -> None:
        """Note the rates at the first batch after an evaluation.

        Args:
            trainer: The running trainer.
            done: Evaluations so far.
        """
        if len(self.past) <= done:
            self.past.append(rates_now(trainer))

    def reason_to_wait(
        self, trainer: Trainer, rest: Remaining, at_epoch_end: bool, every: int = 1
    ) -> str | None:
        """Why not to stop after the present evaluation, if there is a reason.

        Ask after each evaluation.

        Args:
            trainer: The running trainer.
            rest: What is still to come; as much as there was, where that is not known.
            at_epoch_end: Whether the metric comes from training, at the end of epochs.
            every: Of so many validations, or epochs in training, one has the metric. Default: 1.
        """
        now = rates_now(trainer)
        past = [row for row in self.past if len(row) == len(now)]
        left = len(self.past) if rest.evaluations is None else rest.evaluations
        self._ahead = self._ahead[every:]
        if not (left and past and trainer.lr_scheduler_configs):
            return None
        peaks = [max(column) for column in zip(*past, now, strict=True)]
        if reason := _plateau(trainer, peaks, rest):
            return reason
        ahead = self._rates_ahead(trainer, now, left * every, at_epoch_end)[::every]
        columns = zip(zip(*past, strict=True), zip(*ahead, strict=True), strict=False)
        reasons = (reason_to_wait(before, after) for before, after in dict.fromkeys(columns))
        return next(filter(None, reasons), None)

    def _rates_ahead(
        self, trainer: Trainer, now: list[float], left: int, at_epoch_end: bool
    ) -> list[list[float]]:
        """What was foreseen after the evaluation before, as long as it comes true."""
        # There may be more to come than it seemed before; to look again each time would be dear.
        if self._ahead[:1] != [now] or len(self._ahead) < min(0.9 * left, self._enough):
            self._ahead = rates_ahead(trainer, left, len(self.past), at_epoch_end)
            # What is very far ahead can wait.
            self._enough = math.inf if len(self._ahead) == left else len(self._ahead) / 2
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

    A function that sets the rate is asked ahead in a copy, and random numbers are put back. What
    is not in its own reach, an attribute of the module or a global name, it must not change.

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
    # Schedulers warn about the order of steps.
    quiet = redirect_stdout(io.StringIO())  # schedulers may say what they do
    with warnings.catch_warnings(action="ignore"), isolate_rng(), quiet:
        try:
            for row in itertools.islice(_rows(trainer, done, at_epoch_end), left):
                rows.append(row)
        except Exception as error:  # user's code, such as a scheduler that ends before training
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
    copies = [(config, copy.deepcopy(config.scheduler, memo)) for config in configs]
    for _, scheduler in copies:
        _own_functions(scheduler, memo)
    return stand_ins, copies


def _own_functions(scheduler: Any, memo: dict[int, Any]) -> None:
    """Give a copied scheduler, and those inside of it, functions with a state of their own."""
    for name, value in vars(scheduler).items():
        if isinstance(value, list):
            for inner in value:
                if isinstance(inner, LRScheduler):
                    _own_functions(inner, memo)
            value[:] = [_apart(v, memo) if isinstance(v, FunctionType) else v for v in value]
        elif isinstance(value, FunctionType):
            setattr(scheduler, name, _apart(value, memo))


def _apart(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of a function and of the plain values in its reach, which deepcopy would share."""
    if not isinstance(value, FunctionType):
        # Anything may be in reach, a whole model too.
        return copy.deepcopy(value, memo) if isinstance(value, (list, dict, set)) else value
    if id(value) not in memo:
        theirs = value.__closure__ or ()
        cells = tuple(memo.setdefault(id(cell), CellType()) for cell in theirs)
        defaults = value.__defaults__ and tuple(_apart(v, memo) for v in value.__defaults__)
        own = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        own.__kwdefaults__ = value.__kwdefaults__
        memo[id(value)] = own
        for cell, cell_of_theirs in zip(cells, theirs, strict=True):
            cell.cell_contents = _apart(cell_of_theirs.cell_contents, memo)
    return memo[id(value)]


def _plateau(trainer: Trainer, peaks: list[float], rest: Remaining) -> str | None:
    """Whether a scheduler that waits for a plateau can still lower a rate noticeably in time."""
    groups = [group for o in trainer.optimizers for group in o.param_groups]
    peak_of = {id(group): peak for group, peak in zip(groups, peaks, strict=True)}
    for config in trainer.lr_scheduler_configs:
        scheduler: Any = config.scheduler
        if not config.reduce_on_plateau or not _in_time(trainer, config, rest):
            continue
        for group, lowest in zip(scheduler.optimizer.param_groups, scheduler.min_lrs, strict=False):
            now = float(group["lr"])
            peak, noticed = peak_of.get(id(group), now), now - scheduler.eps
            if may_drop(now, scheduler.factor, lowest, peak) and (
                max(now * scheduler.factor, lowest) < noticed
            ):
                return f"{type(scheduler).__name__} may still lower the learning rate"
    return None


def _in_time(trainer: Trainer, config: Any, rest: Remaining) -> bool:
    """Whether a scheduler can lose patience before the run ends."""
    scheduler, left, every = config.scheduler, rest.epochs, config.frequency
    until = -(trainer.current_epoch + 1) % every  # epochs, until it is asked the next time
    if config.interval == "step":
        accumulated = trainer.accumulate_grad_batches
        left, until, every = rest.steps, 0, math.lcm(every, accumulated) // accumulated
    needed = scheduler.patience - scheduler.num_bad_epochs + scheduler.cooldown_counter
    needed += math.isinf(scheduler.best)  # what is first is the best so far
    # Where it is due now, it is asked right after this evaluation.
    return not math.isfinite(left) or until + needed * every < whole(left)
