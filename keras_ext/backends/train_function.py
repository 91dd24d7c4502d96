"""Have Keras trace the training step anew, for one fit only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_ext.backends.patches import Patches

Around = Callable[[Callable[..., Any]], Callable[..., Any]]


def retrace(model: keras.Model, undo: Callable[[], None], around: Around | None = None) -> None:
    """Trace the training step with changes that were just made to a model or its optimizer.

    Call it in `on_train_begin`, and `release` in `on_train_end`. Keras skips `on_train_end` when
    a fit ends in an exception; then `undo` runs as the next fit, or `train_on_batch`, begins.

    Args:
        model: The model that is being fitted.
        undo: Takes the changes off again.
        around: Makes of the training function another that calls it. Default: None, it stays.
    """
    guard = vars(model).get("make_train_function")
    if not isinstance(guard, _Guard):
        guard = _Guard(model)
    if undo not in guard.undos:
        guard.undos.append(undo)
    if around is not None:
        guard.arounds[undo] = around
    guard.trace()


def release(model: keras.Model, undo: Callable[[], None]) -> None:
    """Run `undo`, which was given to `retrace`, and leave the next fit to trace without it."""
    guard = vars(model).get("make_train_function")
    if isinstance(guard, _Guard) and undo in guard.undos:
        guard.undos.remove(undo)
        guard.arounds.pop(undo, None)
        undo()
        if not guard.undos:
            guard.dissolve()


def release_all(model: keras.Model) -> None:
    """Undo everything that was given to `retrace`."""
    guard = vars(model).get("make_train_function")
    if isinstance(guard, _Guard):
        guard.dissolve()


class _Guard:
    """Stands in for a model's `make_train_function` during a fit.

    Keras calls it without `force` at the beginning of a fit only, before any callback. If this
    guard is still there by then, the fit before ended in an exception.
    """

    def __init__(self, model: keras.Model) -> None:
        self.undos: list[Callable[[], None]] = []
        self.arounds: dict[Callable[[], None], Around] = {}
        self._model = model
        self._make = model.make_train_function
        self._step = model.train_step
        self._patches = Patches()
        self._patches.set(model, "make_train_function", self)

    def __call__(self, force: bool = False) -> Any:
        if not force:
            self.dissolve()
            return self._make(force=True)
        return self._remake()

    def trace(self) -> None:
        if keras.backend.backend() == "jax":
            step = self._step
            # jax.jit finds the old trace again as long as it is given an equal function, and two
            # bound methods of one model are equal.
            self._patches.set(self._model, "train_step", lambda *args: step(*args))
        self._remake()

    def _remake(self) -> Any:
        self._make(force=True)
        for around in self.arounds.values():
            self._model.train_function = around(self._model.train_function)
        return self._model.train_function

    def dissolve(self) -> None:
        while self.undos:
            self.undos.pop()()
        self.arounds.clear()
        self._patches.undo()
        self._model.train_function = None
