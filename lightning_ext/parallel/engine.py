"""One training or evaluation step on all stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lightning_ext.parallel import calls, microbatches, transport
from lightning_ext.parallel.checks import same_batch
from lightning_ext.parallel.faults import Faults, guarded
from lightning_ext.parallel.gradients import Deposit, Gradients
from lightning_ext.parallel.logs import Record, combined_outputs
from lightning_ext.parallel.mesh import Mesh
from lightning_ext.parallel.metrics import Metrics
from lightning_ext.parallel.parts import Inputs, Pipeline, PipelinePart, named
from lightning_ext.parallel.returned import Returned, Sharing

Context = Callable[[], AbstractContextManager[Any]]
_KEPT = 8  # shapes of batches for which buffers are kept
_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Engine:
    """Runs the user's steps.

    Args:
        mesh: The ranks.
        root: The LightningModule.
        pipeline: What is cut into stages; None with one stage.
        parts: Of this stage.
        gradients: Of this rank.
        schedule: Name of the schedule.
        count: Microbatches asked for, or None.
        seed: The same on all ranks.
        faults: Tells the other ranks what goes wrong on this one.
    """

    def __init__(
        self,
        mesh: Mesh,
        root: nn.Module,
        pipeline: Pipeline | None,
        parts: Sequence[PipelinePart],
        gradients: Gradients,
        schedule: str,
        count: int | None,
        seed: int,
        faults: Faults,
    ) -> None:
        self.faults = faults
        self.mesh, self.root, self.pipeline, self.parts = mesh, root, pipeline, parts
        self.gradients, self.schedule, self.count, self.seed = gradients, schedule, count, seed
        self.accumulating = self._summing = False
        self.metrics, self.sharing = Metrics(root, mesh, faults), Sharing(mesh)
        self.checked: int | None = None
        self.evaluated = 0
        self._schedules: dict[Any, tuple[Any, list[transport.Meta]]] = {}
        self._step: _Step | None = None
        self._sent: list[transport.Meta] = []

    @property
    def needs_inputs(self) -> bool:
        """Whether this stage looks at what the model is called with."""
        return self.mesh.first or any(part.takes for part in self.parts)

    def run_parts(self, state: tuple[Any, ...], inputs: Inputs) -> Any:
        """This stage's part of the model."""
        output: Any = state
        for i, part in enumerate(self.parts):
            output = part(state, inputs, self.mesh.first and i == 0)
            state = output if isinstance(output, tuple) else (output,)
        return output if self.mesh.last else _sendable(state, self.parts[-1:])

    @guarded
    def train(self, args: tuple[Any, ...], epoch: int, number: int, context: Context) -> Any:
        """A training step: losses and gradients of all microbatches.

        Args:
            args: Of `training_step`; the batch comes first.
            epoch: In which the step is.
            number: Of the step, the same on all ranks.
            context: In which the model runs (autocast).

        Returns:
            What `training_step` returns, on every rank, with a loss whose backward pass brings
            the gradients.
        """
        if self.checked != epoch:
            self.checked = epoch
            self.metrics.attach()
            same_batch(args[0], self.mesh)
        count = microbatches.count_for(
            microbatches.batch_size(args[0]), self.count, self.mesh.layout.pipeline
        )
        step = _Step(self, microbatches.chunks(args[0], count), args[1:], number, context)
        before = self.gradients.take()
        kept = microbatches.kept() if step.seeds else nullcontext()
        # Of several batches the sum is sent, once it is there.
        alone = calls.plain_backward(self.root) and not self.accumulating and not self._summing
        try:
            with self.metrics.in_step(), kept, self.gradients.meant(count, alone) as meant:
                if self.pipeline is None:
                    for i in range(count):
                        step.alone(i).backward()
                else:
                    self._run(step, count)
            found = self.gradients.take()
        finally:
            self.gradients.put(before)
        return self._returned(step, partial(self._bring, found, meant))

    def _run(self, step: _Step, count: int) -> None:
        # A schedule sends gradients back where there were some when it was made.
        trained = tuple(p.requires_grad for p in self.root.parameters())
        key = (count, microbatches.key_of(step.batches[0]), trained)
        if key not in self._schedules:
            if len(self._schedules) >= _KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = self._make(step, count)
        schedule, self._sent = self._schedules[key]
        self._step = step
        index = torch.arange(count)
        failed: Exception | None = None
        try:
            schedule.step(index=index, target=index, return_outputs=False)
        except Exception as error:
            # torch reports what a stage raises as an error of its own.
            failed = step.error or _cause(error)
        self._step = None
        if failed is not None:
            raise failed

    def _make(self, step: _Step, count: int) -> tuple[Any, list[transport.Meta]]:
        """A schedule for one shape of microbatches, and what this stage sends in it."""
        received, sent = self._shapes(step)
        stage = PipelineStage(
            _Stage(self),
            self.mesh.stage,
            self.mesh.layout.pipeline,
            self.mesh.device,
            input_args=_empty(received) or torch.empty(0, device="meta"),
            output_args=_empty(sent) or torch.empty(0, device="meta"),
            group=self.mesh.pipeline,
        )
        few = count < self.mesh.layout.pipeline
        kind = _SCHEDULES["gpipe" if few else self.schedule]
        return kind(stage, count, loss_fn=lambda loss, _: loss, scale_grads=False), sent

    def _shapes(self, step: _Step) -> tuple[list[transport.Meta], list[transport.Meta]]:
        """What this stage receives and sends, by a trial run of the first microbatch.

        torch could find out by itself, but would call the loss function, and with it the user's
        `training_step`, once more, and would run embeddings on indices that nobody has set.
        """
        buffers = [b for b in self.root.buffers() if not b.is_meta]
        kept = [b.clone() for b in buffers]
        state: tuple[Tensor, ...] = ()
        if not self.mesh.first:
            before = self.mesh.stage_rank(self.mesh.stage - 1)
            state = transport.receive(before, self.mesh.pipeline, self.mesh.device)
        received = transport.meta_of(state)
        sent: list[transport.Meta] = []
        if not self.mesh.last:
            output = step.forward(0, state)
            sent = transport.meta_of(output)
            transport.send(output, self.mesh.stage_rank(self.mesh.stage + 1), self.mesh.pipeline)
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)
        return received, sent

    def forward(self, index: int, state: tuple[Tensor, ...]) -> Any:
        """One microbatch through this stage; on the last one, its share of the loss."""
        assert self._step is not None
        try:
            output = self._step.forward(index, state)
            if self.mesh.last:
                return self._step.finish(index, output)
            self._check_sent(index, output)
            return output
        except Exception as error:
            self._step.error = error
            raise

    def _check_sent(self, index: int, output: tuple[Tensor, ...]) -> None:
        """The stage that receives has made room for what the first microbatch was."""
        found, known = transport.meta_of(output), self._sent
        if [meta[:2] for meta in found] != [meta[:2] for meta in known]:
            raise ValueError(
                f"stage {self.mesh.stage} sends {_shapes(found)} for microbatch {index}, but "
                f"{_shapes(known)} for an earlier one with a batch of the same shapes; bring "
                "activations to one length, for example by padding in the collate_fn"
            )

    def _returned(self, step: _Step, bring: Callable[[Tensor], None]) -> Any:
        result = self.sharing.share(step.result() if self.mesh.last else None)
        self.metrics.log(result.logged)
        if result.stop:
            _trainer_of(self.root).should_stop = True
        anchor = torch.zeros((), requires_grad=True, device=self.mesh.device)
        loss = Deposit.apply(anchor, result.loss, bring)
        return {"loss": loss, **result.extras} if result.as_dict else loss

    @guarded
    def _bring(self, found: Sequence[Tensor | None], meant: bool, factor: Tensor) -> None:
        self.gradients.add(found, factor)
        if not self.accumulating:
            self.gradients.sum_over_stages()
            self.gradients.mean_over_data(meant)
        self._summing = self.accumulating

    @guarded
    def evaluate(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """A step without gradients: the whole batch at once, its output on every stage.

        Args:
            step: The user's own, for a batch.
            batch: That it takes.
        """
        if self.evaluated == 0:
            self.metrics.attach()
            same_batch(batch, self.mesh)
        seed = microbatches.mixed(self.seed, self.mesh.data_rank, self.evaluated, 1)
        self.evaluated += 1
        alone = self.pipeline is None and self.mesh.layout.tensor == 1
        with self.metrics.in_step(), nullcontext() if alone else microbatches.kept():
            if not alone:
                microbatches.seed(seed)
            if self.pipeline is None:
                return step(batch)
            return self._evaluated(step, batch, self.pipeline, seed)

    def _evaluated(
        self, step: Callable[[Any], Any], batch: Any, pipeline: Pipeline, seed: int
    ) -> Any:
        module, name = pipeline.module, pipeline.name
        # What is logged before the call is logged when the step runs as a whole.
        with Record(self.metrics.path_of).of(self.root):
            own = microbatches.copied(batch)
            args, kwargs = calls.inputs_of(module, name, lambda: step(own))
        output = self._through(pipeline, args, kwargs)
        microbatches.seed(seed)
        return calls.with_output(module, name, output, lambda: step(batch))

    @guarded
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the pipelined module outside of a step, on every stage."""
        assert self.pipeline is not None
        return self._through(self.pipeline, args, kwargs)

    def _through(self, pipeline: Pipeline, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One stage after the other; the output of the last is shared."""
        inputs = pipeline.bind(args, kwargs) if self.needs_inputs else Inputs()
        state: tuple[Tensor, ...] = ()
        if not self.mesh.first:
            before = self.mesh.stage_rank(self.mesh.stage - 1)
            state = transport.receive(before, self.mesh.pipeline, self.mesh.device)
        output = self.run_parts(state, inputs)
        if not self.mesh.last:
            transport.send(output, self.mesh.stage_rank(self.mesh.stage + 1), self.mesh.pipeline)
        source = self.mesh.stage_rank(self.mesh.layout.pipeline - 1)
        return transport.share_output(output, source, self.mesh.pipeline, self.mesh.device)


class _Step:
    """One training step on one stage."""

    def __init__(
        self,
        engine: Engine,
        batches: list[Any],
        rest: tuple[Any, ...],
        number: int,
        context: Context,
    ) -> None:
        self.engine, self.batches, self.rest, self.context = engine, batches, rest, context
        # Ranks that share tensors drop the same units, however the user has seeded them.
        self.seeds = engine.pipeline is not None or engine.mesh.layout.tensor > 1
        self.base = microbatches.mixed(engine.seed, engine.mesh.data_rank, number)
        self.record = Record(engine.metrics.path_of)
        self.losses: list[Tensor] = []
        self.outputs: list[Any] = []
        self.error: Exception | None = None

    def _call(self, index: int) -> Any:
        training_step: Any = self.engine.root.training_step
        # A stage may run it more than once, and it may write to its batch.
        several = self.engine.pipeline is not None
        batch = microbatches.copied(self.batches[index]) if several else self.batches[index]
        return training_step(batch, *self.rest)

    def _seed(self, index: int, stage: int = -1) -> None:
        """Seed for what all stages draw alike in a microbatch, or for what one of them draws."""
        if self.seeds:
            stages = self.engine.mesh.layout.pipeline
            microbatches.seed(self.base, index * (stages + 1) + stage + 1)

    def _inputs(self, index: int) -> Inputs:
        pipeline = self.engine.pipeline
        assert pipeline is not None
        self._seed(index)
        with Record(self.engine.metrics.path_of).of(self.engine.root):
            found = calls.inputs_of(pipeline.module, pipeline.name, lambda: self._call(index))
        return pipeline.bind(*found)

    def forward(self, index: int, state: tuple[Tensor, ...]) -> Any:
        """One microbatch through this stage."""
        with self.context():
            inputs = self._inputs(index) if self.engine.needs_inputs else Inputs()
            self._seed(index, self.engine.mesh.stage)
            # No leaves of a graph, so that a first layer may write to its input.
            return self.engine.run_parts(tuple(t.clone() for t in state), inputs)

    def finish(self, index: int, output: Any) -> Tensor:
        """The user's step with the output of the model, on the last stage."""
        pipeline = self.engine.pipeline
        assert pipeline is not None
        self._seed(index)
        with self.context(), self.record.of(self.engine.root):
            returned = calls.with_output(
                pipeline.module, pipeline.name, output, lambda: self._call(index)
            )
        return self._loss(returned)

    def alone(self, index: int) -> Tensor:
        """The user's step where there is one stage only."""
        self._seed(index)
        with self.context(), self.record.of(self.engine.root):
            return self._loss(self._call(index))

    def result(self) -> Returned:
        """What the microbatches together return and log."""
        loss, last = torch.stack(self.losses).mean(), self.outputs[-1]
        extras = combined_outputs(self.outputs)
        stop = torch.tensor(float(_trainer_of(self.engine.root).should_stop))
        return Returned(loss, self.record.combined(), extras, isinstance(last, dict), stop)

    def _loss(self, returned: Any) -> Tensor:
        loss = returned["loss"] if isinstance(returned, dict) else returned
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step must return a loss, or a dict with a 'loss', got {returned!r}; to "
                "skip a batch is not possible on several ranks"
            )
        self.losses.append(loss.detach())
        self.outputs.append(returned)
        return loss / len(self.batches)


class _Stage(nn.Module):
    """What torch's schedules call."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.run = engine.forward

    def forward(self, *state: Tensor, index: Tensor) -> Any:
        """Run the microbatch with this index."""
        return self.run(int(index), state)


def _cause(error: Exception) -> Exception:
    """What torch tells as an error of its own when a backward pass fails."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


def _trainer_of(root: Any) -> Any:
    return root.trainer


def _sendable(state: tuple[Any, ...], last: Sequence[PipelinePart]) -> tuple[Tensor, ...]:
    """What a stage sends, as it lies in memory when it is received."""
    for value in state:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the part {named(last[0].run)} ends a stage and returns a {type(value).__name__}, "
                "but only tensors go from stage to stage; let it return a tensor or a tuple of "
                "tensors, take what else is needed with PipelinePart(takes=), or move the cut "
                "with layers_per_stage="
            )
    return tuple(tensor.contiguous() for tensor in state)


def _shapes(metas: list[transport.Meta]) -> str:
    return ", ".join(f"{'x'.join(map(str, shape))} {dtype}" for shape, dtype, _ in metas)


def _empty(metas: list[transport.Meta]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=wants)
        for shape, dtype, wants in metas
    )
