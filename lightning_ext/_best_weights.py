"""The weights of the best evaluation, kept in host memory."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from lightning_ext._compat import LightningModule, Trainer, callbacks_of, is_lightning_class

_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
_AVERAGES = ("weight_averaging.WeightAveraging", "stochastic_weight_avg.StochasticWeightAveraging")


def require_whole_model(trainer: Trainer, instead: str) -> None:
    """Raise if no rank has the whole model, or a callback puts other weights in its place.

    Args:
        trainer: The trainer.
        instead: What to add instead of asking for the best weights.

    Raises:
        ValueError: Its strategy shards the model, or a callback averages weights.
    """
    for callback in callbacks_of(trainer):
        if any(is_lightning_class(callback, f"callbacks.{name}") for name in _AVERAGES):
            raise ValueError(
                f"restore_best=True keeps the weights of the model, but {type(callback).__name__} "
                f"puts averages in their place; pass restore_best=False and add {instead}"
            )
    strategy = trainer.strategy
    ours = any(kind.__name__ == "ThreeDParallelStrategy" for kind in type(strategy).__mro__)
    if ours or any(is_lightning_class(strategy, f"strategies.{name}") for name in _SHARDED):
        raise ValueError(
            f"restore_best=True needs the whole model on every rank, but {type(strategy).__name__} "
            f"shards it; pass restore_best=False and add {instead}"
        )


def copy_of_weights(module: LightningModule) -> dict[str, Any]:
    """What `module.state_dict()` holds now, on the host.

    Args:
        module: The module.
    """
    return {
        name: value.detach().to("cpu", copy=True)
        if isinstance(value, Tensor)
        else copy.deepcopy(value)
        for name, value in module.state_dict().items()
    }
