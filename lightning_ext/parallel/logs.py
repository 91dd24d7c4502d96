"""What a step logs: recorded where it runs, one value for all microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ext import _compat

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}
# Of `self.log` after the name and the value, in order.
_POSITIONS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")


@dataclass(frozen=True)
class Logged:
    """One name that a step logs.

    Args:
        name: Of the value.
        options: Other arguments of `self.log`.
        value: Of all microbatches, with a single element; of a metric object its value for this
            batch, of any shape, or None if it has none.
        metric: Path of the metric object in the module, if one is logged.
    """

    name: str
    options: dict[str, Any]
    value: Tensor | None
    metric: str | None = None


@dataclass
class Record:
    """Calls of `self.log`, by name, one value per microbatch.

    Args:
        path_of: Finds the path of a metric object in the module.
        values: By name.
        options: Other arguments of the last call, by name.
        sizes: Batch sizes that were passed, by name.
        metrics: Paths of metric objects, by name.
    """

    path_of: Callable[[nn.Module], str]
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Take in what `self.log` is called with."""
        kwargs |= dict(zip(_POSITIONS, args, strict=False))
        # All ranks act alike here, and a group could not be sent to the others.
        kwargs.pop("sync_dist_group", None)
        if "reduce_fx" in kwargs:
            kwargs["reduce_fx"] = _name_of(kwargs["reduce_fx"])
        size = kwargs.pop("batch_size", None)
        if size is not None:
            self.sizes[name] = self.sizes.get(name, 0) + int(size)
        self.options[name] = kwargs
        found = self.values.setdefault(name, [])
        if isinstance(value, nn.Module):
            self.metrics[name] = self.path_of(value)
            value = None if kwargs.get("on_step") is False else _compat.batch_value(value)
            if not isinstance(value, Tensor):
                return
            found.append(value.detach())
            return
        tensor = torch.as_tensor(value).detach()
        if tensor.numel() != 1:
            raise ValueError(
                f"self.log({name!r}, ...) was called with a tensor of {tensor.numel()} elements, "
                "but takes a single one; log its mean"
            )
        found.append(tensor.reshape(()))

    @contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """Stand in for a module's `log`."""
        object.__setattr__(module, "log", self)
        try:
            yield
        finally:
            object.__delattr__(module, "log")

    def combined(self) -> list[Logged]:
        """One value per name: the mean over microbatches, or what `reduce_fx` asks for."""
        found = []
        for name, values in self.values.items():
            options = dict(self.options[name])
            if name in self.sizes:
                options["batch_size"] = self.sizes[name]
            if name in self.metrics:
                value = torch.stack(values).double().mean(0).to(values[0].dtype) if values else None
                found.append(Logged(name, options, value, self.metrics[name]))
                continue
            how = options.get("reduce_fx", "mean")
            value = _COMBINE[how](torch.stack(values).double(), 0)
            found.append(
                Logged(name, options, value if how == "mean" else value.to(values[0].dtype))
            )
        return found


def _name_of(reduce_fx: Any) -> str:
    """The name of a reduction as Lightning takes it: by name, or a function of torch or Python."""
    name = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
    name = {"avg": "mean", "amax": "max", "amin": "min"}.get(name, name)
    if name not in _COMBINE:
        raise ValueError(
            f"reduce_fx={reduce_fx!r} is not one of {', '.join(_COMBINE)}; for others log a "
            "torchmetrics object"
        )
    return name


def combined_outputs(outputs: Sequence[Any]) -> dict[str, Any]:
    """What a step returned beside the loss: concatenated, numbers in tensors averaged."""
    if not isinstance(outputs[-1], Mapping):
        return {}
    return {
        name: _together([output[name] for output in outputs])
        for name in outputs[-1]
        if name != "loss"
    }


def _together(values: Sequence[Any]) -> Any:
    last = values[-1]
    if isinstance(last, Tensor):
        tensors = [v.detach() for v in values]
        return torch.cat(tensors) if last.ndim else torch.stack(tensors).double().mean().to(last)
    if isinstance(last, (list, tuple)):
        found = [x.detach() if isinstance(x, Tensor) else x for value in values for x in value]
        return found if isinstance(last, list) else tuple(found)
    if isinstance(last, Mapping):
        return {name: _together([value[name] for value in values]) for name in last}
    return last
