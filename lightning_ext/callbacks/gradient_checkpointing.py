"""Dynamic gradient checkpointing for Lightning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from lightning_ext._compat import LightningModule, Trainer, callbacks_of, may_be_two, wrap_steps
from lightning_ext.callbacks._base import DecidingCallback
from lightning_ext.recompute.advice import compiled_whole
from lightning_ext.recompute.agree import Agreement
from lightning_ext.recompute.attributes import Unlike
from lightning_ext.recompute.blocks import Table
from lightning_ext.recompute.device import left_for
from lightning_ext.recompute.ledger import Ledger, counting, uncounted
from lightning_ext.recompute.microbatched import Microbatched
from lightning_ext.recompute.planned import Planned, explain, plan_for, report_of, tell
from lightning_ext.recompute.retry import Attempts, Batch
from lightning_ext.recompute.runner import Runner
from lightning_ext.recompute.selection import never_seen, select
from lightning_ext.recompute.tensors import DEPTH, tensors_in
from lightning_ext.recompute.units import is_sharded
from strategies.checkpointing import MemoryReport, RecomputePlan
from strategies.checkpointing.budget import check_budget, written
from strategies.checkpointing.kinds import check_kinds
from strategies.checkpointing.shapes import Shapes, in_words

# Of the peak that was too much; each attempt takes so much less.
_TIGHTER = 0.75
_TOLD = 1.05  # of a budget, from which on it is told that it was not kept
_TRAINED = attrgetter("requires_grad")
_TRIES = 3  # to correct a plan, or to see more of the calls that there are


class DynamicGradientCheckpointing(DecidingCallback):
    """Run parts of the model again in the backward pass, as few as a memory budget allows.

    Use it when a model, a batch or a sequence does not fit into memory. In the first step every
    block of the model is run again, which needs little memory, and what each of them saves and
    costs is measured. From then on the plan of least work within the budget is followed: blocks,
    runs of blocks, and within blocks the outputs of norms, activations and dropout, which cost
    next to nothing to make again. Weights after any number of steps are those of a plain run, bit
    for bit; `training_step` is called once a batch.

    When shapes of the batch change, the next step is measured and planned anew; smaller batches
    follow the plan of larger ones. Validation, testing and prediction are left alone, and after
    the fit the module is as it was.

    Args:
        memory_budget: For activations: a share in (0, 1] of what the plain run needs, bytes as an
            int or a text such as `"6GiB"`, or `"auto"`, what the device has left after the first
            step. Default: `"auto"`.
        blocks: What is run again as one: classes of modules, or names as in `named_modules`.
            Default: None, elements of the model's stacks and what is beside them.
        exclude: Classes or names of modules; blocks that are among them, in one or around one are
            never run again. Default: none.

    Attributes:
        plan_: The plan in use, once the first step is over; None if nothing can be run again.
        report_: What was measured, planned and reached; see `report_.explain()` and
            `report_.plot()`. None as long as there is no plan.
        decisions_: What was decided, when and why.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `memory_budget` is out of range, `blocks` is empty, or, when the fit begins,
            `blocks` or `exclude` name something that the module does not have, or another
            `DynamicGradientCheckpointing` is in the Trainer.

    Example:
        >>> from lightning_ext import DynamicGradientCheckpointing
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(
        ...     callbacks=[DynamicGradientCheckpointing(0.5)], logger=False, accelerator="cpu")

    Source:
        Beaumont et al., "Optimal checkpointing for heterogeneous chains" (arXiv 1911.13214),
        theorem 1; Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174).
    """

    def __init__(
        self,
        memory_budget: float | int | str = "auto",
        blocks: Sequence[type[nn.Module] | str] | None = None,
        exclude: Sequence[type[nn.Module] | str] = (),
    ) -> None:
        super().__init__()
        self._budget = check_budget(memory_budget)
        self.memory_budget = memory_budget
        self.blocks = None if blocks is None else check_kinds("blocks", blocks, nn.Module, True)
        self.exclude = check_kinds("exclude", exclude, nn.Module)
        self.plan_: RecomputePlan | None = None
        self.report_: MemoryReport | None = None
        self._forget()

    def _forget(self) -> None:
        self._runner: Runner | None = None
        self._plans: dict[tuple[int, Shapes], Planned] = {}
        self._now: tuple[int, Shapes] | None = None
        self._in_use: Planned | None = None
        self._anew: Planned | None = None  # blocks are to be measured again that it does not have
        self._step = ExitStack()
        self._ledger: Ledger | None = None
        self._parameters: list[nn.Parameter] = []
        self._free: Callable[[], list[Tensor]] = list
        self._agreement, self._alone = Agreement(), True
        self._agree: Callable[[bool], bool] = bool
        self._batch: Batch | None = None
        self._told: set[str] = set()
        self._backward = False  # whether the step had a backward pass
        self._in_vain = Counter[int]()  # steps measured for nothing, by layers that are trained
        self._undo: Callable[[], None] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        ours = [c for c in callbacks_of(trainer) if isinstance(c, DynamicGradientCheckpointing)]
        if len(ours) > 1:
            raise ValueError(
                "two DynamicGradientCheckpointing callbacks are in one Trainer; pass one"
            )

    @may_be_two
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()

    def reset(self) -> None:
        super().reset()
        self._leave()
        self.plan_ = self.report_ = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        usable, why = select(pl_module, self.blocks, self.exclude)
        if why:
            self._fall_back(trainer, why)
        self._agreement = Agreement.of(trainer.strategy)

        def agree(yes: bool, sharded: bool) -> bool:
            if sharded:
                yes = trainer.strategy.reduce_boolean_decision(yes, all=True)
            return self._agreement.all(yes)

        self._runner = Runner(usable, agree=agree, model=pl_module)
        sharded = any(map(is_sharded, usable.values()))
        self._alone = not sharded and self._agreement.group is None
        self._agree = partial(agree, sharded=sharded)
        self._parameters = list(pl_module.parameters())
        attempts = Attempts(pl_module)
        if trainer.world_size == 1:  # other ranks would wait for this one, or for too much

            def wrap(step: Callable[[], Any], accumulates: bool) -> Any:
                if self._idle and trainer.strategy.root_device.type == "cpu":
                    return step()  # which cannot fail in a way that is made up for
                return attempts.run(step, lambda error: self._again(trainer, error), accumulates)

            self._undo = wrap_steps(trainer, wrap)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._runner is not None
        tensors = tensors_in(batch, DEPTH)
        shapes = tuple(tuple(t.shape) for t in tensors)
        self._now = sum(map(_TRAINED, self._parameters)), shapes
        self._free = partial(uncounted, pl_module, tensors)
        self._batch, self._backward = Batch(batch), False
        planned = None if self._anew else self._plan_for(self._now)
        # Ranks that hold parts of the same parameters wait for each other while they measure.
        if not self._agree(planned is not None):
            planned = None
        if planned is None:
            self._in_use = None
            vain = self._alone and self._in_vain[self._now[0]] >= _TRIES
            if not vain and not self._runner.units.keys() <= self._runner.excluded.keys():
                self._runner.measure(self._free())
        elif planned is not self._in_use:
            self._use(planned)
        if planned is not None and planned.report.measured is None:
            self._ledger = Ledger(self._free())
            self._step.enter_context(counting(self._ledger))
        if not self._idle:
            self._step.enter_context(self._runner.step())

    @property
    def _idle(self) -> bool:
        """Whether nothing is run again or looked at."""
        return self._in_use is not None and self._in_use.applied.nothing and self._ledger is None

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._backward = True
        if self._runner is not None and not self._idle:
            self._runner.pause()
            self._runner.checkpoints.settle(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._runner is None or self._idle:
            return
        if pl_module.automatic_optimization:
            self._step_is_over(trainer)
            # Some optimizers run the step again.
            self._step.enter_context(self._runner.step())
        else:
            self._runner.go_on()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._step_is_over(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._leave()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()

    def _leave(self) -> None:
        self._step.close()
        if self._undo is not None:
            self._undo()
        if self._runner is not None:
            self._runner.detach()
        self._forget()

    def _step_is_over(self, trainer: Trainer) -> None:
        self._step.close()
        assert self._runner is not None
        if self._ledger is not None and self._in_use is not None:
            report = replace(self._in_use.report, measured=self._ledger.peak)
            self._in_use.report, self._ledger = report, None
            self.report_ = report
            if not self._runner.unknown:
                self._correct(trainer, self._in_use)
        if self._runner.unknown and self._in_use is not None and self._in_use.tries < _TRIES:
            self._anew = self._in_use  # a step that leaves out other blocks each time
        if self._runner.measurement is not None:
            table = self._runner.measured(trainer.strategy)
            self._tell(trainer)
            if table is None:
                self._runner.detach()
                if self._runner.in_vain and self._backward and self._now is not None:
                    self._in_vain[self._now[0]] += 1
                    self._fall_back(trainer, never_seen(self._runner))
            else:
                self._decide(trainer, table)

    def _plan_for(self, kind: tuple[int, Shapes]) -> Planned | None:
        """The plan for batches of a kind, or of one that is somewhat larger."""
        if kind in self._plans:
            return self._plans[kind]
        plans = {known: plan for (n, known), plan in self._plans.items() if n == kind[0]}
        return plan_for(plans, kind[1])

    def _use(self, planned: Planned) -> None:
        assert self._runner is not None
        self._runner.apply(planned.applied)
        self._in_use = planned
        self.plan_, self.report_ = planned.report.plan, planned.report

    def _decide(self, trainer: Trainer, table: Table | Microbatched) -> None:
        assert self._now is not None
        plan = self._agreed(table, table.plan(self._bytes(trainer, table)))
        assert self._runner is not None
        report = report_of(self._runner, table, plan, in_words(self._now[1]))
        planned = Planned(table, table.applied(plan), report)
        old, self._anew = self._anew, None
        if old is not None and old is self._plan_for(self._now):
            planned.tries = old.tries = old.tries + 1
            if len(old.applied.order) >= len(planned.applied.order):
                self._use(old)
                return
        self._plans[self._now] = planned
        self._use(self._plans[self._now])
        # A run that was interrupted may have decided this before.
        if str(report) not in (d.reason for d in self.decisions_):
            self.record(
                trainer, "plan", str(report), budget=plan.budget, predicted=plan.peak,
                plain=plan.plain_peak, extra=report.extra,
            )  # fmt: skip
        if (lacking := report.shortfall(self.memory_budget)) is not None:
            tell(". ".join((lacking, *compiled_whole(self._runner.units, table.blocks))))

    def _agreed(self, table: Table | Microbatched, plan: RecomputePlan) -> RecomputePlan:
        """A plan, or none of it where ranks that wait for each other in blocks have others."""
        if self._agreement.same(repr((plan.spans, plan.partial))):
            return plan
        tell(
            "ranks of the tensor axis came to different plans, as their pieces differ; nothing is "
            "run again"
        )
        return replace(table.plan(table.plain_peak), spans=(), partial=())

    def _correct(self, trainer: Trainer, planned: Planned) -> None:
        """After a step took more than its budget, as something holds what was to be dropped."""
        plan, measured = planned.report.plan, planned.report.measured
        assert measured is not None
        kept = not plan.fits or measured <= plan.budget or plan.budget >= plan.plain_peak
        if self._agreement.all(kept):
            return
        planned.tries += 1
        over = -self._agreement.least(plan.budget - measured)
        tighter = self._agreed(planned.table, planned.table.plan(max(plan.peak - over, 0)))
        if tighter.peak < plan.peak and planned.tries <= _TRIES:
            self._tighten(trainer, planned, tighter, f"a step took {written(measured)}")
        elif measured > _TOLD * plan.budget:
            tell(
                f"memory_budget={self.memory_budget!r} is {written(plan.budget)}, and a step took "
                f"{written(measured)}: something keeps what blocks have saved, such as an "
                "attribute of a layer"
            )

    def _tighten(
        self, trainer: Trainer, planned: Planned, plan: RecomputePlan, reason: str
    ) -> None:
        planned.applied = planned.table.applied(plan)
        planned.report = replace(
            planned.report, plan=replace(plan, budget=planned.report.plan.budget), measured=None
        )
        self._use(planned)
        reason = f"{reason}; {planned.report}"
        self.record(trainer, "tighten", reason, budget=plan.budget, predicted=plan.peak)

    def _tell(self, trainer: Trainer) -> None:
        """Say which blocks are not run again, once."""
        assert self._runner is not None
        new = {n: why for n, why in self._runner.excluded.items() if n not in self._told}
        if not new:
            return
        self._told |= new.keys()
        reason = "left alone: " + "; ".join(f"{n}, as {why}" for n, why in new.items())
        self.record(trainer, "exclude", reason)
        tell(f"{reason}. Their activations stay")

    def _fall_back(self, trainer: Trainer, reason: str) -> None:
        """Say why nothing is run again, once."""
        if reason not in self._told:
            self._told.add(reason)
            self.record(trainer, "fall back", reason)
            tell(reason)

    def _again(self, trainer: Trainer, error: RuntimeError) -> bool:
        """After a step has failed: make it possible, if that can be done."""
        assert self._runner is not None
        assert self._batch is not None
        if not self._batch.put_back():
            return False
        if not isinstance(error, Unlike):
            return self._make_room(trainer)
        if error.name in self._runner.excluded:
            return False
        self._step.close()
        self._runner.excluded[error.name] = error.reason
        self._tell(trainer)
        self._plans.clear()
        self._ledger = self._in_use = self._anew = None
        self._runner.measure(self._free())
        self._step.enter_context(self._runner.step())
        return True

    def _make_room(self, trainer: Trainer) -> bool:
        """After a step was out of memory: a plan that needs less, if there is one."""
        assert self._runner is not None
        self._step.close()
        planned, self._ledger = self._in_use, None
        if planned is None:
            explain(self._now, None)
            return False
        peak = planned.report.plan.peak
        plan = planned.table.plan(_TIGHTER * peak)
        if plan.peak >= peak:
            explain(self._now, planned)
            return False
        planned.report = replace(planned.report, plan=plan)
        self._tighten(trainer, planned, plan, "a step was out of memory")
        tell(self.decisions_[-1].reason)
        self._step.enter_context(self._runner.step())
        return True

    def _bytes(self, trainer: Trainer, table: Table | Microbatched) -> float:
        if isinstance(self._budget, float):
            return self._budget * table.plain_peak
        if isinstance(self._budget, int):
            return self._budget
        left = left_for(trainer, self._parameters)
        peak = table.plain_peak  # more is not needed
        return peak if left is None else self._agreement.least(min(left, peak))
