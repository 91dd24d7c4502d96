"""torchmetrics objects of a module, on pipeline x data x tensor ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ext import _compat
from lightning_ext.parallel import transport
from lightning_ext.parallel.faults import Faults, guarded
from lightning_ext.parallel.logs import Logged
from lightning_ext.parallel.mesh import Mesh


class Metrics:
    """The metric objects of a module.

    What `training_step` updates is on the last stage alone. So outside a step the last stage
    computes, with the states of all data (the other ranks of a copy saw the same, and are not
    counted), and sends the value to the other stages. Inside a step each rank computes what it has.

    Args:
        root: The LightningModule.
        mesh: The ranks.
        faults: Tells the other ranks what goes wrong on this one.
    """

    def __init__(self, root: nn.Module, mesh: Mesh, faults: Faults) -> None:
        self.root, self.mesh, self.faults = root, mesh, faults
        self.within = False
        self._paths: dict[int, str] = {}

    def attach(self) -> None:
        """Take charge of all metric objects; again for those that have been added since."""
        self._paths = {}
        for path, metric in _compat.metrics_of(self.root):
            self._paths[id(metric)] = path
            gather = metric.dist_sync_fn
            own_group = gather is None and metric.process_group is None
            if own_group or isinstance(gather, _Gather):
                metric.dist_sync_fn = _Gather(self.mesh)
            compute = metric.compute
            if isinstance(compute, _Compute):
                if compute.metrics is self:
                    continue
                compute = compute.inner
            metric.compute = _Compute(self, compute)

    def path_of(self, metric: nn.Module) -> str:
        """Path of a metric object in the module.

        Raises:
            ValueError: It is not in the module, so that other ranks do not have it.
        """
        if id(metric) not in self._paths:
            self.attach()
        if id(metric) not in self._paths:
            raise ValueError(
                f"the {type(metric).__name__} that is logged is no metric of the LightningModule; "
                "make it an attribute in __init__, as self.acc = ..."
            )
        return self._paths[id(metric)]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """A step, in which only some of the ranks may compute."""
        before, self.within = self.within, True
        try:
            yield
        finally:
            self.within = before

    def log(self, logged: list[Logged]) -> None:
        """Log what the last stage has recorded."""
        log: Any = self.root.log
        for entry in logged:
            value: Any = entry.value
            if entry.metric is not None:
                value = self.root.get_submodule(entry.metric)
                _compat.set_batch_value(value, entry.value)
            log(entry.name, value, **entry.options)

    @guarded
    def computed(self, compute: Callable[[], Any]) -> Any:
        """The value of a metric object, on all stages."""
        mesh, last = self.mesh, self.mesh.layout.pipeline - 1
        if self.within or not last:
            return compute()
        value = None
        if mesh.last:
            with self.in_step():
                value = compute()
        return transport.share_output(value, mesh.stage_rank(last), mesh.pipeline, mesh.device)

    def states(self) -> list[str]:
        """Names of the states that checkpoints hold."""
        saved = self.root.state_dict(keep_vars=True)
        names = [
            f"{path}.{name}".lstrip(".")
            for path, metric in _compat.metrics_of(self.root)
            for name in metric.metric_state
        ]
        return [name for name in names if isinstance(saved.get(name), Tensor)]

    def move(self, device: torch.device) -> None:
        """Move states to a device."""
        for _, metric in _compat.metrics_of(self.root):
            held = [*metric.parameters(), *metric.buffers()]
            if not any(tensor.is_meta for tensor in held):
                metric.to(device)


class _Compute:
    """Stands for `compute` of a metric object."""

    def __init__(self, metrics: Metrics, inner: Callable[..., Any]) -> None:
        self.metrics, self.inner = metrics, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.metrics.computed(partial(self.inner, *args, **kwargs))


class _Gather:
    """Gathers a state over the data axis."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        return _compat.gather_states(state, group or self.mesh.data)

    def __deepcopy__(self, memo: Any) -> _Gather:
        return self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        # Process groups cannot be pickled: elsewhere the metric is on its own.
        return _nothing, ()


def _nothing() -> None:
    return None
