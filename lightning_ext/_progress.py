"""How far a run is, and how many evaluations it still has before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning_ext._compat import Trainer, callbacks_of, is_lightning_class

_ROUNDING = 1e-6  # of an evaluation


@dataclass(frozen=True)
class Position:
    """How far a run is.

    Args:
        epochs: Epochs done, with a fraction inside of one; NaN where its length is unknown.
        steps: Optimizer steps done.
        seconds: Training time, 0 where no timer limits it.
        finished: Whole epochs done.
    """

    epochs: float
    steps: float
    seconds: float
    finished: int

    @classmethod
    def of(cls, trainer: Trainer, epoch_over: bool) -> Position:
        """Where a trainer is.

        Args:
            trainer: The running trainer.
            epoch_over: Whether it already counts the present epoch as done.
        """
        loop: Any = trainer.fit_loop
        finished, batches = loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress
        part = 0.0
        if not epoch_over:
            length = float(trainer.num_training_batches)
            ready = batches.current.ready
            if math.isinf(length):  # as long as those before
                length = (batches.total.ready - ready) / finished if finished else math.nan
            part = 1.0 if batches.is_last_batch else min(ready / length, 1.0)
        seconds = _seconds(trainer)[0]
        epochs = finished + part
        return cls(epochs, trainer.global_step, seconds, finished + (part == 1.0))


@dataclass(frozen=True)
class Remaining:
    """What is still to come.

    Args:
        evaluations: How many evaluations; None if nothing limits the run.
        saved: What stopping would save, in epochs or steps.
        done: Epochs or steps so far.
        unit: `"epoch"` or `"step"`.
        epochs: How many epochs, with a fraction; NaN where their length is unknown.
        steps: How many optimizer steps.
    """

    evaluations: int | None
    saved: int
    done: int
    unit: str
    epochs: float = math.inf
    steps: float = math.inf

    @property
    def when(self) -> str:
        """How far the run is, in words."""
        return f"{self.unit} {self.done}"

    @property
    def text(self) -> str | None:
        """What stopping would save, in words."""
        if self.evaluations is None:
            return None
        return f"{self.saved} {self.unit}{'s' * (self.saved != 1)}"


def limits(trainer: Trainer) -> Position:
    """Where a trainer will end, infinite in what does not limit it."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    return Position(
        epochs=math.inf if epochs is None or epochs < 0 else epochs,
        steps=math.inf if steps < 0 else steps,
        seconds=_seconds(trainer)[1],
        finished=0,
    )


def remaining(begun: Position, now: Position, end: Position, done: int, unit: str) -> Remaining:
    """What is left, if evaluations go on as often as so far.

    Args:
        begun: Where the run was at an earlier time.
        now: Where it is.
        end: Where it ends, by whichever limit it meets first.
        done: Evaluations since then.
        unit: In what to tell, `"epoch"` or `"step"`.

    Example:
        >>> begun, now = Position(0, 0, 0, 0), Position(41, 410, 0, 41)
        >>> end = Position(100, float("inf"), float("inf"), 0)
        >>> remaining(begun, now, end, done=41, unit="epoch").text
        '59 epochs'
    """
    times = math.inf  # what is left, in units of what has been
    for name in ("epochs", "steps", "seconds"):
        passed = getattr(now, name) - getattr(begun, name)
        if passed > 0:
            times = min(times, max(getattr(end, name) - getattr(now, name), 0.0) / passed)
    count = now.finished if unit == "epoch" else round(now.steps)
    if math.isinf(times):
        return Remaining(None, 0, count, unit)
    epochs, steps = times * (now.epochs - begun.epochs), times * (now.steps - begun.steps)
    saved = round(epochs if unit == "epoch" else steps)
    return Remaining(whole(times * done), saved, count, unit, epochs, steps)


def whole(count: float) -> int:
    """How many whole ones a number is, whatever rounding took from it.

    Args:
        count: The number.
    """
    return math.floor(count + _ROUNDING)


def fitting(trainer: Trainer) -> bool:
    """Whether what is evaluated counts.

    Args:
        trainer: The running trainer.
    """
    idle = trainer.sanity_checking or getattr(trainer, "fast_dev_run", False)
    return trainer.state.fn == "fit" and not idle


def by_epochs(trainer: Trainer) -> bool:
    """Whether validation comes at the end of epochs, each or every few.

    Args:
        trainer: The trainer.
    """
    every = getattr(trainer, "val_check_interval", None)  # not set where validation is by the clock
    # The whole number 1 is after each batch.
    return isinstance(every, float) and every == 1.0 and bool(trainer.check_val_every_n_epoch)


def once_an_epoch(trainer: Trainer) -> bool:
    """Whether validation comes at the end of each epoch.

    Args:
        trainer: The trainer.
    """
    return by_epochs(trainer) and trainer.check_val_every_n_epoch == 1


def _seconds(trainer: Trainer) -> tuple[float, float]:
    """Training time so far and in all, the same on every rank."""
    for callback in callbacks_of(trainer):
        if is_lightning_class(callback, "callbacks.Timer"):
            left = callback.time_remaining()
            if left is not None:
                elapsed = callback.time_elapsed()
                return trainer.strategy.broadcast((elapsed, elapsed + left))
    return 0.0, math.inf
