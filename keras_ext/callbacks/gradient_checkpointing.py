"""Dynamic gradient checkpointing for any Keras model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from keras_ext._table import Measured, Table
from keras_ext._units import Kind, chosen, names_in, parts_of, units_of
from keras_ext.backends.memory import memory_left
from keras_ext.backends.recompute import Recompute, why_not
from keras_ext.backends.train_function import release_all
from keras_ext.callbacks._base import DecidingCallback
from strategies.checkpointing import MemoryReport, RecomputePlan
from strategies.checkpointing.budget import check_budget
from strategies.checkpointing.kinds import check_kinds, did_you_mean
from strategies.checkpointing.shapes import in_words


class DynamicGradientCheckpointing(DecidingCallback):
    """Run parts of the model again in the backward pass, as few as a memory budget allows.

    Use it when a model, a batch or a sequence does not fit into memory. In the first step every
    block of the model is run again, which needs little memory, and what each of them saves and
    costs is measured. From then on the plan of least work within the budget is followed. The model
    is used as it was built and compiled. Weights after any number of steps are those of a plain
    run: bit for bit on torch, to rounding where a compiler is at work.

    When a batch is larger than all before, it is measured and planned anew; smaller batches follow
    the plan of larger ones. Validation and prediction are left alone, and after the fit the model
    is as it was.

    Args:
        memory_budget: For activations: a share in (0, 1] of what the plain run needs, bytes as an
            int or a text such as `"6GiB"`, or `"auto"`, what the device has left after the first
            step; all is kept where that is not known. Default: `"auto"`.
        blocks: What is run again as one: classes of layers, their names, or paths as in
            `"encoder/block_1"`. Default: None, elements of the model's stacks and what is beside
            them, if they have layers of their own.
        exclude: Classes, names or paths of blocks that are never run again. Default: none.

    Attributes:
        plan_: The plan in use, once the first step is over; None where the fit is a plain one.
        report_: What was measured and is predicted; see `report_.explain()` and
            `report_.plot()`. None where the fit is a plain one.
        decisions_: What was decided, when and why.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `memory_budget` is out of range, `blocks` is empty, or, when the fit begins,
            `blocks` or `exclude` name something that the model does not have, or another
            `DynamicGradientCheckpointing` is in the fit.

    Example:
        >>> import keras, numpy as np
        >>> from keras_ext import DynamicGradientCheckpointing
        >>> def block():
        ...     return keras.Sequential(
        ...         [keras.layers.Dense(64, "tanh"), keras.layers.Dense(64, "tanh")])
        >>> model = keras.Sequential([keras.Input((4,)), *[block() for _ in range(4)]])
        >>> model.compile("sgd", "mse")
        >>> saver = DynamicGradientCheckpointing(0.6)
        >>> x, y = np.ones((8, 4)), np.ones((8, 64))
        >>> history = model.fit(x, y, callbacks=[saver], verbose=0)
        >>> saver.plan_.fits, len(saver.plan_.spans) > 0
        (True, True)

    Source:
        Beaumont et al., "Optimal checkpointing for heterogeneous chains" (arXiv 1911.13214),
        theorem 1; Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174).
    """

    def __init__(
        self,
        memory_budget: float | int | str = "auto",
        blocks: Sequence[Kind] | None = None,
        exclude: Sequence[Kind] = (),
    ) -> None:
        super().__init__()
        self._budget = check_budget(memory_budget)
        self.memory_budget = memory_budget
        self.blocks = None if blocks is None else check_kinds("blocks", blocks, keras.Layer, True)
        self.exclude = check_kinds("exclude", exclude, keras.Layer)
        self.plan_: RecomputePlan | None = None
        self.report_: MemoryReport | None = None
        self._recompute: Recompute | None = None
        self._steps = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        twice = self.has_begun
        super().on_train_begin(logs)
        self.plan_ = self.report_ = self._recompute = None
        self._steps = 0
        model = self.model
        ours = (isinstance(other, DynamicGradientCheckpointing) for other in self.companions())
        if twice or any(ours):
            release_all(model)
            raise ValueError("two DynamicGradientCheckpointing callbacks are in one fit; pass one")
        units = self._units(model)
        if not units:
            exclude = ", and fewer of them in exclude=" if self.exclude else ""
            self._stay_plain(
                "no block of layers is left that could be run again",
                ". Put repeated parts into layers or models of their own, or name them in "
                f"blocks={exclude}",
            )
            return
        if (why := why_not(model)) is not None:
            self._stay_plain(why)
            return
        self._recompute = Recompute(model, units, self._decide)
        self._recompute.install()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # `train_on_batch` called by another callback looks to Keras like the start of a new fit.
        if self._recompute is not None and not self._recompute.in_force:
            self._recompute.install()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps += 1

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._recompute is not None:
            self._recompute.remove()
            self._recompute = None
        super().on_train_end(logs)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_recompute": None}

    def _units(self, model: keras.Model) -> dict[str, keras.Layer]:
        """Blocks that may be run again, by name."""
        for name, kinds in (("blocks", self.blocks or ()), ("exclude", self.exclude)):
            for kind in kinds:
                if not chosen(model, [kind]):
                    raise ValueError(
                        f"{name}={kinds!r}: the model has no {kind!r}; pass classes of its layers, "
                        "their names or paths of names such as 'encoder/block_1'"
                        f"{did_you_mean(kind, names_in(model))}"
                    )
        units = units_of(model) if self.blocks is None else chosen(model, self.blocks)
        left_out = chosen(model, self.exclude).values()
        inside = {id(part) for layer in left_out for part in parts_of(layer)}
        outside = set(map(id, left_out))
        return {
            name: unit
            for name, unit in units.items()
            if id(unit) not in inside and outside.isdisjoint(map(id, parts_of(unit)))
        }

    def _stay_plain(self, why: str, cure: str = "") -> None:
        self.plan_ = self.report_ = None
        reason = f"{why}: the fit is a plain one"
        self.decisions_.record(self._steps, "fall back", reason)
        if self._budget != "auto":
            _tell(f"{reason}{cure}")

    def _decide(self, measured: Measured | None, why: str) -> frozenset[str]:
        """Names of the blocks to run again, by what was measured."""
        table = None if measured is None else measured.table()
        if table is None or table.holds_nothing:
            told = table and "its blocks hold nothing beyond what they take and return"
            self._stay_plain(told or why)
            return frozenset()
        plan = table.plan(self._bytes(table))
        self.plan_ = plan
        self.report_ = MemoryReport(
            in_words(table.shapes), table.blocks, plan, None, table.advice, table.forward
        )
        self.decisions_.record(
            self._steps, "plan", str(self.report_), budget=plan.budget, predicted=plan.peak,
            plain=plan.plain_peak, extra=self.report_.extra,
        )  # fmt: skip
        if (lacking := self.report_.shortfall(self.memory_budget)) is not None:
            _tell(lacking)
        return table.chosen(plan)

    def _bytes(self, table: Table) -> float:
        if isinstance(self._budget, float):
            return self._budget * table.plain_peak
        if isinstance(self._budget, int):
            return self._budget
        assert self._recompute is not None
        left = memory_left(self._recompute.model)
        if left is None:
            return table.plain_peak
        return max(left - self._recompute.gradients_to_come, 0)


def _tell(text: str) -> None:
    warnings.warn(f"DynamicGradientCheckpointing: {text}", stacklevel=3)
