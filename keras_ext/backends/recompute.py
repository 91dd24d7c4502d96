"""Blocks of a built and compiled model, run again in the backward pass for the time of one fit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import keras

from keras_ext._table import Measured, size_of
from keras_ext._units import parts_of
from keras_ext.backends.internals import is_rematerialized
from keras_ext.backends.patches import Patches
from keras_ext.backends.train_function import release, retrace
from strategies.checkpointing.shapes import Shapes, somewhat_larger

# How Keras is told that the data are at an end.
_AT_AN_END = {"StopIteration", "OutOfRangeError"}
_NONE: frozenset[str] = frozenset()
_NONE_LEFT = "no block is left that can be run again"


def why_not(model: keras.Model) -> str | None:
    """What keeps blocks of a model from being run again, or none.

    Args:
        model: Built and compiled.
    """
    backend = keras.backend.backend()
    if backend not in ("torch", "tensorflow", "jax"):
        return f"the {backend} backend cannot run blocks again"
    if keras.distribution.distribution() is not None:
        return "blocks of a model that is distributed with keras.distribution cannot be run again"
    if backend == "tensorflow" and not _is_alone(model):
        return "blocks of a model under a tf.distribute.Strategy cannot be run again"
    if backend == "jax" and any(map(is_rematerialized, parts_of(model))):
        # jax keeps the first trace of such layers, with what it was traced with.
        return "layers that were made under keras.RematScope cannot be traced twice"
    return None


def _is_alone(model: keras.Model) -> bool:
    return int(model.distribute_strategy.num_replicas_in_sync) == 1


class Recompute:
    """Runs blocks of a model again, those that are chosen once a step was measured.

    What a backend needs for it is in the module `remat_` and its name: `step` runs the training
    function, and measures where `knows` says that it has to; `run` calls a block that is to be run
    again; `KEEPS_GRADIENTS` says whether those of the last step are there when it is measured, and
    `IS_PURE` whether a call that fails has changed nothing.

    Args:
        model: Built and compiled.
        blocks: Its blocks, by name.
        decide: Gets what was measured, none if nothing could be, and why that is; returns names of
            blocks.
    """

    def __init__(
        self,
        model: keras.Model,
        blocks: Mapping[str, keras.Layer],
        decide: Callable[[Measured | None, str], frozenset[str]],
    ) -> None:
        self._engine: Any = import_module(f"keras_ext.backends.remat_{keras.backend.backend()}")
        self.model = model
        self._blocks = blocks
        self._decide = decide
        self._patches = Patches()
        self._chosen = _NONE
        self._known: dict[Shapes, frozenset[str]] = {}
        self._measured: dict[Shapes, Measured] = {}
        self._refused: set[str] = set()
        self._outdated = False  # whether a block was refused that is in a plan
        self._given_up = False
        self._meter: Any = None
        self._in_step = False

    @property
    def in_force(self) -> bool:
        """Whether it is installed and nobody has removed it."""
        return bool(self._patches)

    @property
    def gradients_to_come(self) -> int:
        """Bytes of gradients that were not there when memory was looked at."""
        trained = [] if self._engine.KEEPS_GRADIENTS else self.model.trainable_variables
        return sum(size_of(variable.shape, variable.dtype) for variable in trained)

    @property
    def settled(self) -> bool:
        """Whether anything is decided."""
        return bool(self._known)

    def install(self) -> None:
        """Take effect from the next step on."""
        for name, layer in self._blocks.items():
            self._patches.set(layer, "call", self._wrapped(name, layer, layer.call))
        retrace(self.model, self._undo, self._around)

    def remove(self) -> None:
        """Leave the model as it was."""
        release(self.model, self._undo)

    def _undo(self) -> None:
        self._patches.undo()

    def knows(self, shapes: Shapes) -> bool:
        """Whether it is decided what is done with batches of some shapes; then, that is done.

        Args:
            shapes: Of the arrays of a batch.
        """
        if self._given_up:
            return True
        for known, chosen in self._known.items():
            if somewhat_larger(known, shapes):
                self._chosen = chosen
                return True
        return False

    @contextmanager
    def measuring(self, meter: Any) -> Iterator[None]:
        """A context in which blocks are called by what measures them.

        Args:
            meter: Its `call` gets a block, its name, what it does, and arguments.
        """
        self._meter = meter
        try:
            yield
        finally:
            self._meter = None

    def look(self, shapes: Shapes, meter: Any, trace: Callable[[], None]) -> None:
        """Decide on batches of some shapes by what is seen while a step is traced.

        Args:
            shapes: Of the arrays of a batch.
            meter: As for `measuring`.
            trace: Traces the step.
        """
        if self.model.run_eagerly and type(self.model).train_step is not keras.Model.train_step:
            # It may count, print, or write.
            self._give_up(shapes, "under run_eagerly, a train_step of your own is not traced")
            return
        why, measured = "", None
        try:
            with self.measuring(meter):
                trace()
            measured = meter.measured()
        except Exception as error:  # the plain run may still be a good one
            why = f"what the step saves could not be seen ({_brief(error)})"
        self.settle(shapes, measured, why or (_NONE_LEFT if self._refused else ""))

    def prove(self, shapes: Shapes, trace: Callable[[], Any]) -> None:
        """Trace the step as it was decided on; decide otherwise until that is no failure.

        Args:
            shapes: Of the arrays of a batch.
            trace: Traces the step.
        """
        while self._chosen:
            self._outdated = False
            try:
                trace()
            except Exception as error:
                why = f"a step in which blocks are run again fails ({_brief(error)})"
                self._give_up(shapes, why)
            if not self._outdated:
                return
            self.settle(shapes, self._measured[shapes])
        self._outdated = False

    def _give_up(self, shapes: Shapes, why: str) -> None:
        self._given_up, self._outdated = True, False
        self.settle(shapes, None, why)

    def settle(self, shapes: Shapes, measured: Measured | None, why: str = "") -> None:
        """Decide on batches of some shapes.

        Args:
            shapes: Of the arrays of the batch that was measured.
            measured: What was, or none.
            why: There is nothing. Default: no block took part.
        """
        usable = None
        if measured is not None:
            self._measured[shapes] = measured
            usable = measured.without(self._refused)
            why = why or _NONE_LEFT
        self._chosen = self._decide(usable, why or "no block took part in the step")
        # The last that was decided is looked at first.
        self._known.pop(shapes, None)
        self._known = {shapes: self._chosen} | self._known

    def _decide_anew(self) -> None:
        """Decide without the blocks that were refused since, and trace the step again."""
        self._outdated = False
        for shapes, measured in [*self._measured.items()]:
            self.settle(shapes, measured)
        retrace(self.model, self._undo, self._around)

    def _wrapped(self, name: str, layer: keras.Layer, call: Callable[..., Any]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._in_step or name in self._refused:
                return call(*args, **kwargs)
            if self._meter is not None:
                attempt = partial(self._meter.call, layer, name, call)
            elif name in self._chosen:
                attempt = partial(self._engine.run, layer, call)
            else:
                return call(*args, **kwargs)
            if not self._engine.IS_PURE:
                return attempt(args, kwargs)
            try:
                return attempt(args, kwargs)
            except Exception as error:
                output = call(*args, **kwargs)  # what is wrong with the call itself is said here
                self.refuse(name, _brief(error))
                return output

        return run

    def refuse(self, name: str, why: str) -> None:
        """Run a block no more than once from now on, and say so.

        Args:
            name: Of the block.
            why: It cannot be run again.
        """
        self._refused.add(name)
        self._outdated |= name in self._chosen
        warnings.warn(
            f"DynamicGradientCheckpointing: block {name!r} cannot be run again "
            f"({why}); it is kept. Put it in exclude=[{name!r}]",
            stacklevel=2,
        )

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The training function, with blocks run again while it runs and at no other time."""

        def run(*args: Any) -> Any:
            self._in_step = True
            try:
                result = self._engine.step(self, step, args)
                if self._outdated:
                    self._decide_anew()
                return result
            except BaseException as error:
                if type(error).__name__ not in _AT_AN_END:
                    self.remove()
                raise
            finally:
                self._in_step = False

        return run


def _brief(error: Exception) -> str:
    # Keras tells at length where an error came from, and in bold what it is.
    told = re.search(r"\x1b\[1m(.+?)\x1b\[0m", str(error), re.DOTALL)
    return f"{type(error).__name__}: {told[1] if told else error}".partition("\n")[0][:200]
