"""What goes into `Trainer(strategy=...)`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ext import _compat
from lightning_ext._compat import ParallelStrategy, Trainer
from lightning_ext.parallel import loaders, transport
from lightning_ext.parallel.arguments import check_arguments, check_others
from lightning_ext.parallel.buffers import Buffers
from lightning_ext.parallel.calls import OnStages
from lightning_ext.parallel.checkpoint import Divided
from lightning_ext.parallel.checks import check_callbacks, check_supported, share_model
from lightning_ext.parallel.division import check_undivided, divide, one_by_one
from lightning_ext.parallel.engine import Engine
from lightning_ext.parallel.faults import Faults, guarded
from lightning_ext.parallel.gradients import clip_together, gradients_of
from lightning_ext.parallel.mesh import Mesh, connect
from lightning_ext.parallel.parts import Pipeline, PipelinePart
from lightning_ext.parallel.split import drop_foreign, owners, split_tensors
from lightning_ext.parallel.summary import summary, warn_of_whole
from strategies.parallel import Layout, TensorPlan


class ThreeDParallelStrategy(ParallelStrategy):
    """Train an ordinary LightningModule on pipeline x data x tensor ranks, as one device would.

    The module named by `pipeline_module` is cut into stages of consecutive parts, the linear layers
    of its attention and MLPs are split over the tensor axis, and the rest of the ranks see other
    data. `training_step` and all other hooks stay as they are. Ranks are ordered as in Megatron:
    tensor fastest, then data, then pipeline.

    Args:
        pipeline: Stages. Default: 1.
        tensor: Ranks over which tensors are split. Default: 1.
        data: Copies of the model, or `"auto"`: as many as the devices allow. Default: `"auto"`.
        microbatches: Parts into which each batch is cut. A batch that it does not divide is cut
            into fewer. Default: None, up to four per stage.
        schedule: `"gpipe"` or `"1f1b"`. Default: `"1f1b"`.
        shard_parameters: Not there yet. Default: False.
        pipeline_module: Path of the module to cut, such as `"model"`: an `nn.Sequential`, or one
            with a method `pipeline_parts()` that lists what `forward` runs in order (modules or
            `PipelinePart`s). Default: None, the only such child of the LightningModule.
        tensor_plan: `{pattern: "column" | "row" | "vocab" | "replicate"}` by module path, for what
            is not recognised. Default: None.
        layers_per_stage: Parts in each stage. Default: None, balanced by cost.
        sequence_parallel: Not there yet. Default: False.
        process_group_backend: `"gloo"`, `"nccl"`. Default: None, by device.
        timeout: Of collectives, in seconds. Default: 1800.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size is not positive, the schedule is unknown, there are fewer microbatches
            than stages in `1f1b`, or a switch is on that is not there yet.

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM" (arXiv 2104.04473).

    Example:
        >>> ThreeDParallelStrategy(pipeline=2, tensor=2, microbatches=8)
        ThreeDParallelStrategy(pipeline=2, tensor=2, data='auto', microbatches=8, schedule='1f1b')
    """

    def __init__(
        self,
        pipeline: int = 1,
        tensor: int = 1,
        data: int | Literal["auto"] = "auto",
        microbatches: int | None = None,
        schedule: str = "1f1b",
        shard_parameters: bool = False,
        pipeline_module: str | None = None,
        tensor_plan: Mapping[str, str] | None = None,
        layers_per_stage: Sequence[int] | None = None,
        sequence_parallel: bool = False,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__()
        check_arguments(
            pipeline, tensor, data, microbatches, schedule,
            shard_parameters=shard_parameters, sequence_parallel=sequence_parallel,
        )  # fmt: skip
        check_others(pipeline_module, tensor_plan, layers_per_stage, process_group_backend, timeout)
        self.pipeline, self.tensor, self.data = pipeline, tensor, data
        self.microbatches, self.schedule = microbatches, schedule
        self.pipeline_module, self.tensor_plan = pipeline_module, tensor_plan
        self.layers_per_stage, self.timeout = layers_per_stage, timeout
        self.process_group_backend = process_group_backend
        self.shard_parameters, self.sequence_parallel = shard_parameters, sequence_parallel
        self.num_nodes = 1
        self.mesh: Mesh | None = None
        self.plan = TensorPlan()
        self.faults = Faults()
        self._shuffles = False  # what Lightning would, where all ranks see all data
        self._asked: Trainer | None = None  # whether it would
        self._engine: Engine | None = None
        self._divided: Divided | None = None
        self._buffers: Buffers | None = None

    def __repr__(self) -> str:
        names = ("pipeline", "tensor", "data", "microbatches", "schedule")
        given = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({given})"

    @property
    def root_device(self) -> torch.device:
        """Device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_nodes * self.num_processes > 1

    @property
    def layout(self) -> Layout:
        """Sizes of the axes."""
        return Layout.resolve(
            self.num_nodes * self.num_processes, self.pipeline, self.tensor, self.data
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Only the data axis sees other samples."""
        at = self.layout.coordinates(self.global_rank)
        return {"num_replicas": self.layout.data, "rank": at.data}

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if not environment.creates_processes_externally:
            self._launcher = _compat.subprocess_launcher(
                environment, self.num_processes, self.num_nodes
            )

    def setup_environment(self) -> None:
        """Check sizes, then connect the processes."""
        layout, environment = self.layout, self.cluster_environment
        assert environment is not None
        if self.lightning_module is not None:
            if self._asked is not self._trainer and layout.data == 1:
                self._asked = self._trainer
                self._shuffles = _compat.keep_samplers(self._trainer)
            check_callbacks(self._trainer, self.pipeline)
            self._check_early(self.lightning_module)
        super().setup_environment()
        self.set_world_ranks()
        timeout = timedelta(seconds=self.timeout)
        with self.faults.connecting():
            connect(environment, self.process_group_backend, self.root_device, timeout)
            if self.mesh is None or self.mesh.layout != layout:  # each has its groups and threads
                self.mesh = Mesh.of(layout, self.root_device, timeout)
        self.faults.ready(self.global_rank, layout.world_size, f"stage {self.mesh.stage}")

    def set_world_ranks(self) -> None:
        """Which process this is; Lightning asks early, so that data can be cut before a fit."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
            _compat.set_rank(self.global_rank)

    def _check_early(self, module: nn.Module) -> None:
        try:
            self._check(module)
        except ValueError:
            if not _compat.made_late(module):  # else it may get its layers only now
                raise

    def _check(self, module: nn.Module) -> tuple[Pipeline | None, list[list[PipelinePart]]]:
        check_supported(self)
        pipeline, stages, self.plan = divide(
            module, self.pipeline, self.tensor, self.pipeline_module, self.layers_per_stage,
            self.tensor_plan,
        )  # fmt: skip
        return pipeline, stages

    def setup(self, trainer: Trainer) -> None:
        """Cut the model, then make the optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = trainer.lightning_module
        if self._engine is None or self._engine.root is not module:
            self._cut(module)
        assert self._engine is not None
        self._engine.metrics.attach()
        self._engine.checked = None
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            if self._divided is not None and self._divided.rules:
                one_by_one(self.optimizers)
        self.setup_precision_plugin()
        assert self._engine is not None
        clip_together(self.precision_plugin, self._engine.gradients)

    def _cut(self, module: nn.Module) -> None:
        mesh = self.mesh
        assert mesh is not None
        check_undivided(module)
        pipeline, stages = self._check(module)
        told = summary(
            module, mesh.layout, pipeline, stages, self.plan, self.schedule, self.microbatches
        )
        _compat.rank_zero_info(f"ThreeDParallelStrategy: {told}")
        warn_of_whole(self.plan, self.tensor)
        share_model(module, mesh)
        stages_of = owners(module, stages)
        drop_foreign(module, stages_of, mesh.stage)
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        rules = split_tensors(module, self.plan, mesh) if self.tensor > 1 else {}
        seed = int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed() % 2**31)
        with self.faults.connecting():
            gradients = gradients_of(module, stages_of, mesh)
        self._engine = Engine(
            mesh, module, pipeline, stages[mesh.stage], gradients, self.schedule,
            self.microbatches, transport.share(seed, 0), self.faults,
        )  # fmt: skip
        if pipeline is not None:
            answer = OnStages(pipeline.name, self._engine.call)
            object.__setattr__(pipeline.module, "forward", answer)
        self._buffers = Buffers(module, stages_of, mesh, self.faults)
        states = dict.fromkeys(self._engine.metrics.states(), (mesh.layout.pipeline - 1,))
        self._divided = Divided(module, stages_of | states, rules, mesh)

    def process_dataloader(self, dataloader: Any) -> Any:
        """All ranks of a copy of the model see the same, in the same order."""
        if self._shuffles:
            dataloader = loaders.shuffled_alike(dataloader)
        return loaders.alike(dataloader, self.layout.coordinates(self.global_rank).data)

    def model_to_device(self) -> None:
        """Move what this rank holds."""
        self._move(self.root_device)

    def _move(self, device: torch.device) -> None:
        assert self.lightning_module is not None
        tensors = [*self.lightning_module.parameters(), *self.lightning_module.buffers()]
        for tensor in tensors:
            # Pieces are made where they belong.
            if not tensor.is_meta and not isinstance(tensor, DTensor) and tensor.device != device:
                tensor.data = tensor.data.to(device)
        if self._engine is not None:
            self._engine.metrics.move(device)

    def _number(self) -> int:
        trainer = self._trainer
        return int(trainer.fit_loop.epoch_loop.total_batch_idx) if trainer.training else 0

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's, on all microbatches and stages."""
        assert self._engine is not None
        return self._engine.train(
            (*args, *kwargs.values()), self._trainer.current_epoch, self._number(),
            self.precision_plugin.train_step_context,
        )  # fmt: skip

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's, on the whole batch."""
        return self._evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's, on the whole batch."""
        return self._evaluate("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's, on the whole batch."""
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self._engine is not None
        batch, *rest = (*args, *kwargs.values())
        step = getattr(self.lightning_module, name)
        with self.precision_plugin.val_step_context():
            return self._engine.evaluate(lambda own: step(own, *rest), batch)

    def _begin_evaluation(self) -> None:
        assert self._buffers is not None
        assert self._engine is not None
        self._buffers.share()
        self._engine.evaluated = 0

    on_validation_start = on_test_start = on_predict_start = _begin_evaluation

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While gradients accumulate, ranks do not exchange them."""
        assert self._engine is not None
        self._engine.accumulating = True
        try:
            yield
        finally:
            self._engine.accumulating = False

    @guarded
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    @guarded
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of one rank on all."""
        return transport.share(obj, src) if dist.is_initialized() else obj

    @guarded
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Mean, sum or the like over the data axis; all ranks of a copy have the same."""
        if not isinstance(tensor, Tensor) or self.mesh is None:
            return tensor
        return transport.reduced(tensor, self.mesh.data, reduce_op)

    @guarded
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Values along the data axis."""
        assert self.mesh is not None
        return super().all_gather(tensor, group=group or self.mesh.data, sync_grads=sync_grads)

    @guarded
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, say yes."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == self.world_size if all else bool(votes)

    @guarded
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model as one process would save it, on rank zero; what is here, on the others."""
        assert self._buffers is not None
        assert self._divided is not None
        self._buffers.share()
        return self._divided.whole_state()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take from the state of a whole model what belongs here."""
        assert self.lightning_module is not None
        module, state = self.lightning_module, checkpoint["state_dict"]
        if self._engine is not None and self._engine.root is module:
            assert self._divided is not None
            state = self._divided.pieces(state)
        else:
            # Lightning loads before it converts, which would round what is in double precision.
            self.precision_plugin.convert_module(module)
        module.load_state_dict(state, strict=strict)
        if self._buffers is not None:
            self._buffers.remember()

    @guarded
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer as one process would save it, on rank zero."""
        assert self._divided is not None
        return self._divided.whole_optimizer(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take from the state of whole optimizers what belongs here."""
        assert self._divided is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(self._divided.optimizer_pieces(optimizer, state))

    def on_exception(self, exception: BaseException) -> None:
        """Do not leave the other ranks waiting for this one."""
        if reason := self.faults.tell(exception):
            exception.add_note(reason)

    def teardown(self) -> None:
        """Move what is here to the CPU, and let go of the devices."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        if self.lightning_module is not None:
            self._move(torch.device("cpu"))
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
