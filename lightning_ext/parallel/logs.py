"""What a step logs: recorded where it runs, averaged over microbatches, logged on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


@dataclass
class Record:
    """Calls of `self.log`, by name, one value per microbatch.

    Args:
        values: By name.
        options: Other arguments of the last call, by name.
    """

    values: dict[str, list[Tensor]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Take in what `self.log` is called with."""
        if isinstance(value, nn.Module):
            raise TypeError(
                f"self.log({name!r}, <{type(value).__name__}>) inside training_step: a metric "
                "object cannot be logged from one stage of a pipeline; log its value, or log it in "
                "validation_step"
            )
        if args:
            kwargs |= dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False))
        self.values.setdefault(name, []).append(torch.as_tensor(value).detach().cpu())
        self.options[name] = kwargs

    @contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """Stand in for a module's `log`."""
        object.__setattr__(module, "log", self)
        try:
            yield
        finally:
            object.__delattr__(module, "log")

    def combined(self) -> list[tuple[str, Tensor, dict[str, Any]]]:
        """One value per name: the mean over microbatches, or what `reduce_fx` asks for."""
        found = []
        for name, values in self.values.items():
            how = self.options[name].get("reduce_fx", "mean")
            together = torch.stack([v.double() if v.ndim == 0 else v for v in values])
            value = _COMBINE[how](together, 0) if how in _COMBINE else together.mean(0)
            found.append((name, value.to(values[0].dtype if how != "mean" else value.dtype),
                          self.options[name]))  # fmt: skip
        return found


def combined_outputs(outputs: Sequence[Any]) -> dict[str, Any]:
    """What a step returned beside the loss: concatenated, numbers averaged."""
    if not isinstance(outputs[-1], Mapping):
        return {}
    found: dict[str, Any] = {}
    for name, last in outputs[-1].items():
        values = [output[name] for output in outputs]
        if name == "loss":
            continue
        if not isinstance(last, Tensor):
            found[name] = last
        elif last.ndim == 0:
            found[name] = torch.stack([v.detach() for v in values]).double().mean().to(last.dtype)
        else:
            found[name] = torch.cat([v.detach() for v in values])
    return found
