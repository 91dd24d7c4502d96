"""Learning rates of the epochs to come, as far as the optimizer and its callbacks tell."""

from __future__ import annotations

import copy
import io
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import keras
import numpy as np

from keras_ext.backends.internals import schedule_of, schedule_steps
from strategies.early_stopping.schedule import may_drop, reason_to_wait

PLATEAU = "ReduceLROnPlateau may still lower the learning rate"

_FAR = 1000  # epochs; to look further ahead costs more than it tells
_SMALL = 10_000  # values; to copy more than these costs too much
_SHARED = (NoneType, int, float, complex, str, bytes, np.generic, Enum, PurePath, type, ModuleType,
           FunctionType, np.ufunc)  # fmt: skip
_CHANCE = (random.Random, np.random.Generator, np.random.RandomState)


class RateWatch:
    """The learning rate of each epoch: of those done, and of those to come.

    Knows a `LearningRateSchedule` in the optimizer, and `LearningRateScheduler` and
    `ReduceLROnPlateau` among the callbacks. It knows nothing of rates that are set in other ways,
    of a `MultiOptimizer`, and of a scheduler's function that fails when asked ahead, or that has
    more in reach than plain values, such as a method of a model.

    Args:
        callbacks: All callbacks of the fit. Default: none.
    """

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback] = ()) -> None:
        known, kinds = list(callbacks), keras.callbacks
        self._schedulers = [c for c in known if isinstance(c, kinds.LearningRateScheduler)]
        self._plateaus = [c for c in known if isinstance(c, kinds.ReduceLROnPlateau)]
        self._rate = self._now = math.nan
        self._steps = self._per_epoch = 0
        self._left = math.inf
        self._plan: dict[int, float] = {}
        self._failed = False

    def epoch_begins(self, optimizer: Any) -> None:
        """Look at the optimizer when all callbacks have set the rate of an epoch."""
        self._rate, self._steps = _rate_of(optimizer), _steps_of(optimizer)

    def epoch_ends(self, optimizer: Any, epoch: int, epochs: int | None) -> float:
        """Foresee the epochs to come, and return the rate of the last step of this one.

        Args:
            optimizer: The model's.
            epoch: The epoch that ends, counted from 0.
            epochs: At which one training ends, None where it is unknown.
        """
        done = _steps_of(optimizer)
        schedule = schedule_of(_innermost(optimizer))
        rate = self._rate if schedule is None else _value(schedule, done - 1)
        self._now = _rate_of(optimizer)
        self._left = math.inf if epochs is None else epochs - 1 - epoch
        per_epoch = done - self._steps
        # Whatever else changes the rate shows as a difference to the plan.
        unforeseen = (per_epoch, rate) != (self._per_epoch, self._plan.get(epoch))
        if schedule is None:
            unforeseen |= self._now != self._rate
        if unforeseen or len(self._plan) < min(self._left, _FAR / 2):
            self._per_epoch = per_epoch
            ahead = range(epoch + 1, epoch + 1 + int(min(self._left, _FAR)))
            with _unnoticed():
                if schedule is None:
                    self._plan = self._simulated(ahead)
                else:
                    steps = {e: done - 1 + per_epoch * (e - epoch) for e in ahead}
                    self._plan = {e: _value(schedule, step) for e, step in steps.items()}
        self._plan = {e: planned for e, planned in self._plan.items() if e > epoch}
        return rate

    def ahead(self, epoch: int, every: int = 1) -> list[float]:
        """Rates of every so many epochs after one that has ended."""
        return [rate for e, rate in self._plan.items() if not (e - epoch) % every]

    def reason_to_wait(self, past: Sequence[float], epoch: int, every: int = 1) -> str | None:
        """Why not to stop yet, as the end of a sentence that begins with "held, as".

        Args:
            past: Rates at the evaluations so far.
            epoch: The epoch that has ended.
            every: Epochs from one evaluation to the next.
        """
        peak = max([*past, self._now])
        if any(self._may_reduce(plateau, peak) for plateau in self._plateaus):
            return PLATEAU
        return reason_to_wait(past, self.ahead(epoch, every))

    def _may_reduce(self, plateau: keras.callbacks.ReduceLROnPlateau, peak: float) -> bool:
        epochs = plateau.patience - plateau.wait + plateau.cooldown_counter
        lowest = float(np.float32(plateau.min_lr))  # as the optimizer keeps it
        return epochs < self._left and may_drop(self._now, plateau.factor, lowest, peak)

    def _simulated(self, ahead: Iterable[int]) -> dict[int, float]:
        if self._failed:
            return {}
        plan, rate = {}, self._now
        try:
            schedules = [_apart(scheduler.schedule) for scheduler in self._schedulers]
            for epoch in ahead:
                for schedule in schedules:
                    rate = _asked(schedule, epoch, rate)
                plan[epoch] = rate
        except Exception:  # a user's function can raise anything
            self._failed = True
            return {}
        return plan


def _innermost(optimizer: Any) -> Any:
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _rate_of(optimizer: Any) -> float:
    # A MultiOptimizer raises AttributeError.
    rate = getattr(optimizer, "learning_rate", math.nan)
    return float(keras.ops.convert_to_numpy(rate))


def _steps_of(optimizer: Any) -> int:
    return schedule_steps(_innermost(optimizer)) or 0


def _value(schedule: Callable[[Any], Any], step: int) -> float:
    try:
        return float(keras.ops.convert_to_numpy(schedule(max(step, 0))))
    except Exception:  # a user's class can raise anything
        return math.nan


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Without a word, and without a step of the global sources of random numbers."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _asked(schedule: Callable[..., Any], epoch: int, rate: float) -> float:
    """What a schedule says, as `LearningRateScheduler` asks it."""
    try:
        answer = schedule(epoch, rate)
    except TypeError:
        answer = schedule(epoch)
    return float(np.float32(answer))  # as the optimizer keeps it


def _apart(value: Any) -> Any:
    """A copy of a schedule with a state of its own: to ask ahead must not change the run.

    Raises:
        TypeError: Something in its reach is not plain, or too large.
    """
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _apart(value.__self__))
    if isinstance(value, partial):
        named = {name: _apart(argument) for name, argument in value.keywords.items()}
        return partial(_apart(value.func), *map(_apart, value.args), **named)
    if isinstance(value, FunctionType):
        cells = tuple(CellType(_apart(cell.cell_contents)) for cell in value.__closure__ or ())
        defaults = tuple(map(_apart, value.__defaults__ or ()))
        apart = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        apart.__kwdefaults__ = {k: _apart(v) for k, v in (value.__kwdefaults__ or {}).items()}
        return apart
    if isinstance(value, _SHARED):
        return value
    if not _is_plain(value):
        raise TypeError(f"{type(value).__name__} is not copied")
    return copy.deepcopy(value)


def _is_plain(value: Any) -> bool:
    """Whether all that a value holds are a few numbers, texts and the like."""
    rest: list[Any] = [value]
    for _ in range(_SMALL):
        if not rest:
            return True
        value = rest.pop()
        if isinstance(value, dict):
            rest += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            rest += value
        elif isinstance(value, np.ndarray):
            rest += [None] * min(value.size, _SMALL)
        elif isinstance(value, FunctionType) and value.__closure__:
            return False  # `deepcopy` would share its state
        elif isinstance(value, (*_SHARED, *_CHANCE)):
            pass
        elif hasattr(value, "__dict__") and value.__new__ is object.__new__:
            rest += vars(value).values()  # an object of a class that is written in Python
        else:
            return False
    return False
