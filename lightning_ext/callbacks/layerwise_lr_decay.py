"""Layer-wise learning rate decay for Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lightning_ext._compat import (
    LightningModule,
    Trainer,
    callbacks_of,
    is_lightning_class,
    rank_zero_warn,
)
from lightning_ext._layer_rates import check_optimizer, layer_rates
from lightning_ext._scaled_step import ScaledStep, stepping_optimizers
from lightning_ext.callbacks._base import DecidingCallback
from strategies.learning_rate import LayerwiseDecay, LayerwiseRates

# So long may mixed precision skip steps in search of its loss scale.
_STEPS_IN_DOUBT = 20


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
        self._rates: list[LayerwiseRates] = []
        self._left_out: list[str] = []
        self._steps: list[list[ScaledStep]] = []
        self._group_state: list[Any] = []
        self._seen: list[Any] = []
        self._equal: list[int] = []  # optimizers that fell back
        self._begun = 0
        self._in_doubt = False

    def reset(self) -> None:
        super().reset()
        self._group_state, self._equal = [], []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if sum(isinstance(c, LayerwiseLRDecay) for c in callbacks_of(trainer)) > 1:
            raise ValueError(
                "two LayerwiseLRDecay callbacks are in one Trainer; pass one, and describe all "
                "levels in its groups=[...]"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._decide(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning restores the optimizers, and with them new group objects, after on_fit_start.
        self._load_group_state()
        self._seen = _groups(trainer)
        self._explain(trainer)
        self._begun, self._in_doubt = trainer.global_step, True

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Someone unfroze layers, or made new optimizers: both are rare, and told by the groups.
        if (now := _groups(trainer)) != self._seen:
            self._group_state = self._current_group_state()
            self._decide(trainer, pl_module)
            self._load_group_state()
            self._seen = now
            self._explain(trainer)
        for step in self._all_steps():
            step.go_last()

    def _decide(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            check_optimizer(optimizer)
        self._detach()  # an earlier fit may have ended without a hook, as a tuner's does
        self._rates, self._left_out = layer_rates(self._rule, pl_module, trainer.optimizers)
        named = list(pl_module.named_parameters(remove_duplicate=False))
        self.multipliers_, self.levels_ = {}, self._rates[0].levels
        for optimizer, rates in zip(trainer.optimizers, self._rates, strict=True):
            # Frozen parameters get theirs too: they may join an optimizer mid-run.
            factors: dict[Tensor, float] = {
                p: rates.multipliers[n] for n, p in named if n in rates.multipliers
            }
            fixed = [p for n, p in named if n in rates.no_weight_decay]
            each = [] if len(self._steps) in self._equal else stepping_optimizers(optimizer)
            self._steps.append([ScaledStep(inner, factors, fixed) for inner in each])
            self.multipliers_ |= rates.multipliers
        known = {p for _, p in named}
        groups = [group for o in trainer.optimizers for group in o.param_groups]
        if any(p not in known for group in groups for p in group["params"]):
            rank_zero_warn(
                "LayerwiseLRDecay: an optimizer holds parameters that are not in "
                f"{type(pl_module).__name__}; they learn at the full rate. Assign what they belong "
                "to to an attribute of the module to count them."
            )

    def _explain(self, trainer: Trainer) -> None:
        reason = "; ".join(dict.fromkeys(rates.reason for rates in self._rates))
        if self._left_out:
            reason += f"; frozen and not counted: {', '.join(self._left_out)}"
        numbers = {
            "levels": float(max(len(rates.levels) for rates in self._rates)),
            "lowest": min(min(rates.levels.values()) for rates in self._rates),
        }
        last = next((d for d in reversed(self.decisions_) if d.action == "set rates"), None)
        if last is None or (last.reason, dict(last.numbers)) != (reason, numbers):
            self.record(trainer, "set rates", reason, **numbers)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        watched = any(
            is_lightning_class(c, "callbacks.LearningRateMonitor") for c in callbacks_of(trainer)
        )
        if watched and trainer.loggers:
            metrics = dict(self._effective_rates(trainer))
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)

    def _effective_rates(self, trainer: Trainer) -> Iterator[tuple[str, float]]:
        for i, (optimizer, rates) in enumerate(zip(trainer.optimizers, self._rates, strict=False)):
            if not self._steps[i]:
                continue
            depth_of = {factor: depth for depth, factor in rates.levels.items()}
            for j, group in enumerate(optimizer.param_groups):
                name = f"lr-layerwise{f'-{i}' * (i > 0)}"
                name += f"/pg{j + 1}" * (len(optimizer.param_groups) > 1)
                for factor in self._steps[i][0].factors_of(group):
                    rate = float(group["lr"]) * factor
                    yield f"{name}/level_{depth_of.get(factor, max(rates.levels))}", rate

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        for step in self._all_steps():  # the user may have caught what a step raised
            step.restore()
        self._check_in_force(trainer)

    def _check_in_force(self, trainer: Trainer) -> None:
        """Fall back to equal rates where an optimizer does not follow its `param_groups`."""
        for i, steps in enumerate(self._steps):
            if any(step.passed_over for step in steps):
                self._fall_back(trainer, i, "passed over some of its parameter groups")
        if not self._in_doubt or trainer.global_step < self._begun + _STEPS_IN_DOUBT:
            return
        self._in_doubt = False
        # Of several optimizers, some may not have had their turn; at a rate of 0, none does.
        if len(trainer.optimizers) > 1 or not self._steps[0]:
            return
        idle = not any(group["lr"] for group in trainer.optimizers[0].param_groups)
        if not idle and all(step.asked is None for step in self._steps[0]):
            self._fall_back(trainer, 0, "takes no notice of its param_groups")

    def _fall_back(self, trainer: Trainer, index: int, what: str) -> None:
        for step in self._steps[index]:
            step.detach()
        self._steps[index] = []
        self._equal.append(index)
        name = type(trainer.optimizers[index]).__name__
        reason = f"{name} {what}: its parameters learn at equal rates"
        self.record(trainer, "fall back", reason)
        rank_zero_warn(f"LayerwiseLRDecay: {reason}; use an optimizer of torch.optim, unwrapped")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish()
        super().on_fit_end(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._finish()

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "group_state": self._current_group_state(),
            "equal": list(self._equal),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._group_state = state_dict["group_state"]
        self._equal = list(state_dict["equal"])

    def _all_steps(self) -> Iterator[ScaledStep]:
        for steps in self._steps:
            yield from steps

    def _current_group_state(self) -> list[Any]:
        return [step.group_state() for step in self._all_steps()] or self._group_state

    def _load_group_state(self) -> None:
        for step, state in zip(self._all_steps(), self._group_state, strict=False):
            step.load_group_state(state)

    def _finish(self) -> None:
        for step in self._all_steps():
            step.restore()
        self._group_state = self._current_group_state()
        self._detach()

    def _detach(self) -> None:
        for step in self._all_steps():
            step.detach()
        self._steps = []

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no running fit, so it takes none of the optimizers' hooks along.
        return {**self.__dict__, "_steps": [], "_seen": []}


def _groups(trainer: Trainer) -> list[Any]:
    """What changes when parameters join an optimizer, or another optimizer takes over."""
    return [
        (id(o), [list(map(id, group["params"])) for group in o.param_groups])
        for o in trainer.optimizers
    ]
