"""Logged metrics as every rank sees them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_ext._compat import Trainer


class MeanLoss:
    """Mean of what `training_step` returned."""

    def __init__(self, total: float = 0.0, count: int = 0) -> None:
        self.total: Any = total  # a tensor once something was added, so that no step waits
        self.count = count

    def add(self, trainer: Trainer, outputs: Any) -> None:
        """Add the loss of a step, if it has one.

        Args:
            trainer: The running trainer.
            outputs: What `on_train_batch_end` is given.
        """
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # With manual optimization it may be anything.
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Lightning hands over the share of a loss in the accumulated gradient.
            self.total = (
                self.total + loss.detach().float().squeeze() * trainer.accumulate_grad_batches
            )
            self.count += 1

    @property
    def value(self) -> Any:
        """The mean, None if there was no loss."""
        return self.total / self.count if self.count else None

    def over_ranks(self, trainer: Trainer) -> MeanLoss:
        """What it is on the average rank; all of them have to ask."""
        return MeanLoss(mean_over_ranks(trainer, self.total), self.count)

    def state_dict(self) -> list[Any]:
        """Sum and number, as plain values."""
        return [float(self.total), self.count]


def metric(trainer: Trainer, name: str, before: Tensor | None) -> Tensor | None:
    """A metric, or None where it has not been logged again.

    Args:
        trainer: The running trainer, which keeps metrics until they are logged again.
        name: The metric.
        before: What it was before what should have logged it.

    Raises:
        ValueError: It is not a single number.
    """
    value = trainer.callback_metrics.get(name)
    if value is not None and value.numel() != 1:
        raise ValueError(f"{name!r} has shape {tuple(value.shape)}; log a single number")
    return None if value is before else value


def require_logged(trainer: Trainer, argument: str, name: str, where: str) -> None:
    """Raise on every rank if a metric is missing on one of them.

    Args:
        trainer: The running trainer.
        argument: The argument that names it.
        name: The metric.
        where: The hook in which to log it.

    Raises:
        ValueError: It is missing.
    """
    known = [str(key) for key in trainer.callback_metrics]
    if on_any_rank(trainer, name not in known):
        if name in known:
            raise ValueError(
                f"{argument}={name!r} is logged on some ranks only; log it on all of them"
            )
        raise ValueError(
            f"{argument}={name!r} is not logged; pass one of "
            f"{', '.join(map(repr, known)) or '(nothing was logged)'}, or log it with self.log in "
            f"{where}"
        )


def on_any_rank(trainer: Trainer, value: bool) -> bool:
    """Whether something holds on at least one rank; all of them have to ask.

    Args:
        trainer: The running trainer.
        value: Whether it holds on this one.
    """
    return bool(trainer.strategy.reduce_boolean_decision(value, all=False))


def mean_over_ranks(trainer: Trainer, value: Any) -> float:
    """The mean of a number, NaN if one rank has none; all of them have to ask.

    Args:
        trainer: The running trainer.
        value: A number, a tensor of one, or None.
    """
    device = trainer.strategy.root_device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    tensor = torch.as_tensor(math.nan if value is None else value).squeeze().to(device, dtype)
    return float(trainer.strategy.reduce(tensor, reduce_op="mean"))
