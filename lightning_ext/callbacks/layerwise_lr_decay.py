"""Layer-wise learning rate decay for Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from lightning_ext._compat import LightningModule, Trainer, is_lightning_class
from lightning_ext._layers import layers_from_module
from lightning_ext._scaled_step import ScaledStep
from lightning_ext.callbacks._base import DecidingCallback
from strategies.learning_rate import (
    Layer,
    LayerwiseDecay,
    LayerwiseRates,
    smallest_holding,
    without_frozen_tail,
)


class LayerwiseLRDecay(DecidingCallback):
    """Let earlier layers learn slower than later ones.

    For depth `d` of `L` levels a parameter learns at `base_lr * decay ** (L - d)`: the head at
    the full rate, stem and embeddings slowest. Use it when you fine-tune a pretrained network:
    its early layers hold general features and need little change.

    Module, optimizers, parameter groups and schedulers stay as they are. Schedulers act on the
    base rates; the factors are applied while the optimizer steps, so the ratio between layers is
    exact at every step. `LearningRateMonitor` therefore shows base rates; where one is in use,
    this callback logs the rates of the levels as `"lr-layerwise/level_<d>"` once an epoch.
    Checkpoints hold the user's own parameter groups: they load with or without the callback.

    With several optimizers over separate parts of the module (a GAN), each part counts its own
    depths. A frozen network that comes after the trained one (a teacher) is not counted.

    Args:
        decay: Ratio between one level and the next, in (0, 1]. Default: 0.75.
        groups: Your own levels instead of those found in the module: name patterns from the
            input to the output (`["embed", "blocks.0", "blocks.1"]`; what none claims is one
            level above the last), or a callable from parameter name to depth. Default: None.
        no_decay_on_bias_and_norm: Whether weight decay leaves biases and norms alone.
            Default: False.

    Attributes:
        multipliers_: Factor on the learning rate, by parameter name, once a fit has started.
        levels_: Factor by depth, from the input to the output; with several optimizers, the
            first one's.
        decisions_: What was decided, when and why.

    Raises:
        TypeError: An argument has the wrong type, or an optimizer has no parameter groups that
            can be split.
        ValueError: `decay` is outside (0, 1], `groups` does not fit the module, an optimizer
            cannot have several rates, or nothing is trainable.

    Example:
        >>> from lightning_ext import LayerwiseLRDecay
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(
        ...     callbacks=[LayerwiseLRDecay(decay=0.75)], logger=False, accelerator="cpu")

    Source:
        Clark et al., "ELECTRA" (2020), appendix A; Bao et al., "BEiT" (2021), section 3.1;
        He et al., "Masked Autoencoders" (2021), appendix A.1.
    """

    def __init__(
        self,
        decay: float = 0.75,
        groups: list[str] | Callable[[str], int] | None = None,
        no_decay_on_bias_and_norm: bool = False,
    ) -> None:
        super().__init__()
        self._rule = LayerwiseDecay(decay, groups, no_decay_on_bias_and_norm)
        self.decay = decay
        self.groups = groups
        self.no_decay_on_bias_and_norm = no_decay_on_bias_and_norm
        self.multipliers_: dict[str, float] = {}
        self.levels_: dict[int, float] = {}
        self._steps: list[ScaledStep] = []
        self._rates: list[LayerwiseRates] = []
        self._left_out: list[str] = []
        self._group_state: list[Any] = []

    def reset(self) -> None:
        super().reset()
        self._group_state = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()  # an earlier fit may have ended without a hook, as a tuner's does
        super().on_fit_start(trainer, pl_module)
        for optimizer in trainer.optimizers:
            _check(optimizer)
        named = list(pl_module.named_parameters(remove_duplicate=False))
        held = [{p for g in o.param_groups for p in g["params"]} for o in trainer.optimizers]
        network, self._left_out = _counted(pl_module, named, held)
        self._rates = [self._rule.decide(part) for part in _parts(network, named, held)]
        self.multipliers_ = {}
        for optimizer, rates in zip(trainer.optimizers, self._rates, strict=True):
            self._attach(optimizer, rates, named)
        self.levels_ = self._rates[0].levels

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning restores the optimizers, and with them new group objects, after on_fit_start.
        for step, state in zip(self._steps, self._group_state, strict=False):
            step.load_group_state(state)
        self._explain(trainer)

    def _attach(
        self, optimizer: Optimizer, rates: LayerwiseRates, named: list[tuple[str, Parameter]]
    ) -> None:
        # Parameters that are frozen, or in no group yet, get theirs too: they may join mid-run.
        factors = {p: rates.multipliers[n] for n, p in named if n in rates.multipliers}
        fixed = [p for n, p in named if n in rates.no_weight_decay]
        self._steps.append(ScaledStep(optimizer, factors, fixed))
        self.multipliers_ |= rates.multipliers

    def _explain(self, trainer: Trainer) -> None:
        reason = "; ".join(dict.fromkeys(rates.reason for rates in self._rates))
        if self._left_out:
            reason += f"; frozen and not counted: {', '.join(self._left_out)}"
        numbers = {
            "levels": float(max(len(rates.levels) for rates in self._rates)),
            "lowest": min(min(rates.levels.values()) for rates in self._rates),
        }
        last = self.decisions_[-1] if self.decisions_ else None
        if last is None or (last.reason, dict(last.numbers)) != (reason, numbers):
            self.record(trainer, "set rates", reason, **numbers)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        watched = any(
            is_lightning_class(c, "callbacks.LearningRateMonitor") for c in trainer.callbacks
        )
        if not (watched and trainer.loggers):
            return
        for i, (optimizer, rates) in enumerate(zip(trainer.optimizers, self._rates, strict=True)):
            base = float(optimizer.param_groups[0]["lr"])
            prefix = f"lr-layerwise-{i}" if i else "lr-layerwise"
            metrics = {f"{prefix}/level_{depth}": base * m for depth, m in rates.levels.items()}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        for step in self._steps:  # the user may have caught what a step raised
            step.restore()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish()
        super().on_fit_end(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._finish()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "group_state": self._current_group_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._group_state = state_dict["group_state"]

    def _current_group_state(self) -> list[Any]:
        return [step.group_state() for step in self._steps] or self._group_state

    def _finish(self) -> None:
        self._group_state = self._current_group_state()
        self._detach()

    def _detach(self) -> None:
        for step in self._steps:
            step.detach()
        self._steps = []

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no running fit, so it takes none of the optimizers' hooks along.
        return {**self.__dict__, "_steps": []}


def _check(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise TypeError(
            f"optimizer {name} has no param_groups, so its parameters cannot have different "
            "rates; use a torch.optim.Optimizer such as AdamW"
        )
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise TypeError(
            f"optimizer {name} is not a torch.optim.Optimizer and cannot be hooked; return one "
            "from configure_optimizers"
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS takes one step for all parameters together and allows one rate only; use "
            "AdamW or SGD with LayerwiseLRDecay"
        )


def _counted(
    pl_module: LightningModule, named: list[tuple[str, Parameter]], held: list[set[Parameter]]
) -> tuple[Layer, list[str]]:
    """The module's layers without a frozen network at its end."""
    trained = {n for n, p in named if p.requires_grad and any(p in group for group in held)}
    if not trained:
        raise ValueError(
            f"{type(pl_module).__name__} has no trainable parameter in an optimizer; unfreeze "
            "some and return them from configure_optimizers"
        )
    return without_frozen_tail(layers_from_module(pl_module), trained)


def _parts(
    network: Layer, named: list[tuple[str, Parameter]], held: list[set[Parameter]]
) -> list[Layer]:
    """For each optimizer, the part of the network whose depths count.

    Optimizers over separate sub-networks count each their own; optimizers that share one (Muon
    for the matrices, AdamW for the rest) count the whole.
    """
    known = {p.name for p in network.all_parameters()}
    names = [{n for n, p in named if p in group and n in known} for group in held]
    if len(held) == 1 or not all(names):
        return [network] * len(held)
    parts = [smallest_holding(network, group) for group in names]
    inside = [{p.name for p in part.all_parameters()} for part in parts]
    separate = sum(map(len, inside)) == len(set().union(*inside))
    return parts if separate else [network] * len(held)
