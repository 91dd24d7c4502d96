"""The one place that imports Lightning, under whichever of its two names the user has it.

`lightning` and `pytorch_lightning` ship the same code as two packages with separate classes. The
one that is already imported wins, then `lightning`, then `pytorch_lightning`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])
_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _choose() -> ModuleType:
    for name in _NAMES:
        if (module := sys.modules.get(name)) is not None:
            return module
    for name in _NAMES:
        if find_spec(name.partition(".")[0]) is not None:
            return import_module(name)
    raise ImportError(
        "lightning_ext needs PyTorch Lightning: pip install 'lightning-keras-ext[lightning]'",
        name="lightning",
    )


pl = _choose()

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.strategies import ParallelStrategy
else:
    Callback, LightningModule, Trainer = pl.Callback, pl.LightningModule, pl.Trainer
    EarlyStopping = import_module(f"{pl.__name__}.callbacks").EarlyStopping
    ParallelStrategy = import_module(f"{pl.__name__}.strategies").ParallelStrategy

__all__ = [
    "Callback",
    "EarlyStopping",
    "LightningModule",
    "ParallelStrategy",
    "Trainer",
    "batch_value",
    "callbacks_of",
    "gather_states",
    "is_lightning_class",
    "isolate_rng",
    "keep_samplers",
    "logged_at",
    "made_late",
    "may_be_two",
    "metrics_of",
    "pl",
    "rank_zero_info",
    "rank_zero_warn",
    "seed_worker",
    "set_batch_value",
    "set_rank",
    "subprocess_launcher",
    "syncs_batchnorm",
    "with_sampler",
    "wrap_steps",
]

_utilities = import_module(f"{pl.__name__}.utilities")
rank_zero_info, rank_zero_warn = _utilities.rank_zero_info, _utilities.rank_zero_warn


def isolate_rng() -> AbstractContextManager[None]:
    """A context after which the random states of Python, numpy and torch are as before."""
    context: AbstractContextManager[None] = import_module(
        f"{pl.__name__}.utilities.seed"
    ).isolate_rng(include_cuda=False)
    return context


def is_lightning_class(value: Any, path: str) -> bool:
    """Whether a value is of a Lightning class, of either package.

    Args:
        value: Any object.
        path: Where the class is found inside the package, such as
            `"callbacks.LearningRateMonitor"`.
    """
    module, _, name = path.rpartition(".")
    loaded = (sys.modules.get(f"{package}.{module}") for package in _NAMES)
    return isinstance(value, tuple(getattr(m, name, ()) for m in loaded if m is not None))


def batch_value(metric: Any) -> Any:
    """What a torchmetrics object found for the last batch, which Lightning logs at a step.

    Args:
        metric: A torchmetrics object.
    """
    return metric._forward_cache


def set_batch_value(metric: Any, value: Any) -> None:
    """Let Lightning log this value of a torchmetrics object at a step.

    Args:
        metric: A torchmetrics object.
        value: For the last batch.
    """
    metric._forward_cache = value


def syncs_batchnorm(strategy: Any) -> bool:
    """Whether the trainer was built with `sync_batchnorm=True`.

    Args:
        strategy: Of that trainer.
    """
    return strategy._layer_sync is not None


def wrap_steps(
    trainer: Trainer, wrap: Callable[[Callable[[], Any], bool], Any]
) -> Callable[[], None]:
    """Stand around forward and backward pass of each step of automatic optimization.

    Args:
        trainer: Before it trains.
        wrap: Gets what runs them, and whether gradients are added to those that are there.

    Returns:
        A function that undoes it.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    make = loop._make_closure

    def made(*args: Any, **kwargs: Any) -> Any:
        closure = make(*args, **kwargs)
        run, accumulates = closure.closure, closure._zero_grad_fn is None
        closure.closure = lambda *a, **k: wrap(lambda: run(*a, **k), accumulates)  # type: ignore[method-assign]
        return closure

    loop._make_closure = made  # type: ignore[method-assign]

    def undo() -> None:
        vars(loop).pop("_make_closure", None)

    return undo


def keep_samplers(trainer: Trainer) -> bool:
    """Let a trainer leave samplers as they are.

    Args:
        trainer: Before it asks for data.

    Returns:
        Whether it was built with `use_distributed_sampler=True`, its default.
    """
    connector = trainer._accelerator_connector
    placed = bool(connector.use_distributed_sampler)
    connector.use_distributed_sampler = False
    return placed


def with_sampler(loader: Any, sampler: Any) -> Any:
    """A DataLoader as it is, with another sampler.

    Args:
        loader: A DataLoader.
        sampler: For it.
    """
    return import_module(f"{pl.__name__}.utilities.data")._update_dataloader(loader, sampler)


def callbacks_of(trainer: Trainer) -> list[Any]:
    """The callbacks of a trainer, an attribute that Lightning sets but does not declare.

    Args:
        trainer: Any trainer.
    """
    return list(getattr(trainer, "callbacks", ()))


def logged_at(trainer: Trainer, epoch_over: bool) -> int:
    """The step at which the trainer logs the metrics of the present evaluation.

    Args:
        trainer: The running trainer.
        epoch_over: Whether it already counts the present epoch as done.
    """
    # Optimizer steps are not it, with several optimizers or in the middle of an accumulation, and
    # there is no public name: Lightning's own LearningRateMonitor reads this one.
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step - epoch_over


def gather_states(state: Any, group: Any) -> Any:
    """A state of a torchmetrics object on all ranks of a group.

    Args:
        state: A tensor.
        group: Of processes.
    """
    return import_module("torchmetrics.utilities.distributed").gather_all_tensors(state, group)


def made_late(module: Any) -> bool:
    """Whether a module makes its layers in a hook, once the processes are connected.

    Args:
        module: A LightningModule.
    """
    hooks = ("setup", "configure_model", "configure_sharded_model")
    return any(
        getattr(type(module), hook, None) is not getattr(LightningModule, hook, None)
        for hook in hooks
    )


def may_be_two(state_dict: _Method) -> _Method:
    """Let Lightning build a trainer with two callbacks of a kind, which `setup` then refuses.

    Where a class overrides `state_dict`, Lightning says no more than that state keys are equal.

    Args:
        state_dict: Of the callback.
    """
    vars(state_dict)["__wrapped__"] = Callback.state_dict
    return state_dict


def metrics_of(module: Any) -> list[tuple[str, Any]]:
    """The torchmetrics objects in a module, by path.

    Args:
        module: A module of torch.
    """
    # Lightning has imported torchmetrics itself.
    metric = import_module("torchmetrics").Metric
    return [(path, m) for path, m in module.named_modules() if isinstance(m, metric)]


def seed_worker(worker: int, rank: int) -> None:
    """Seed a worker of a DataLoader as Lightning does.

    Args:
        worker: Its number.
        rank: Of the process that it belongs to, among those that see other data.
    """
    fabric = "lightning.fabric" if pl.__name__ == "lightning.pytorch" else "lightning_fabric"
    import_module(f"{fabric}.utilities.seed").pl_worker_init_function(worker, rank)


def set_rank(rank: int) -> None:
    """Tell Lightning, of which rank this process is, for what only rank zero says.

    Args:
        rank: Of this process, in all.
    """
    _utilities.rank_zero_only.rank = rank


def subprocess_launcher(environment: Any, processes: int, nodes: int) -> Any:
    """What starts the other processes of this node with the same script.

    Args:
        environment: Cluster environment of the run.
        processes: On this node.
        nodes: In all.
    """
    launchers = import_module(f"{pl.__name__}.strategies.launchers")
    # All of Lightning's own strategies use it; there is no public one.
    return launchers._SubprocessScriptLauncher(environment, processes, nodes)
