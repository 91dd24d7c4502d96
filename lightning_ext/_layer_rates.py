"""Which part of a LightningModule each of its optimizers' layer-wise rates are counted in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from lightning_ext._compat import LightningModule
from lightning_ext._layers import layers_from_module
from lightning_ext._scaled_step import stepping_optimizers
from strategies.learning_rate import (
    Layer,
    LayerwiseDecay,
    LayerwiseRates,
    networks_of,
    without_frozen_tail,
)

Named = Sequence[tuple[str, Parameter]]

# They compute one step size for all parameters together, and raise on groups of different rates.
_ONE_RATE = {"LBFGS", "Prodigy", "DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdaGrad"}


def check_optimizer(optimizer: Any) -> None:
    """Make sure that the parameters of an optimizer can have different rates.

    Args:
        optimizer: What `configure_optimizers` returned.

    Raises:
        TypeError: It has no parameter groups, or is no torch optimizer.
        ValueError: It allows one rate only.
    """
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
    if not (inside := stepping_optimizers(optimizer)):
        raise TypeError(
            f"optimizer {name} cannot be hooked; call super().__init__(params, defaults) in it"
        )
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer {name} has a parameter group without a learning rate (lr=None), so there "
            "is nothing to scale; give it one, with transformers.Adafactor also "
            "relative_step=False"
        )
    for inner in inside:
        if isinstance(inner, LBFGS) or type(inner).__name__ in _ONE_RATE:
            raise ValueError(
                f"{type(inner).__name__} takes one step size for all parameters together and "
                "allows one rate only; use AdamW or SGD with LayerwiseLRDecay"
            )


def layer_rates(
    rule: LayerwiseDecay, pl_module: LightningModule, optimizers: Sequence[Optimizer]
) -> tuple[list[LayerwiseRates], list[str]]:
    """What the rule decides for each optimizer of a module.

    Optimizers over separate sub-networks (a GAN) count the depths of their own; optimizers that
    share one (Muon for the matrices, AdamW for the rest) count the whole. The user's own levels
    always name the whole module.

    Args:
        rule: The rule.
        pl_module: The module that is trained.
        optimizers: Its optimizers.

    Returns:
        One decision for each optimizer, and the names of frozen networks that are not counted.

    Raises:
        ValueError: No trainable parameter is in an optimizer, or the rule does not fit.
    """
    named: Named = list(pl_module.named_parameters(remove_duplicate=False))
    held = [{p for group in o.param_groups for p in group["params"]} for o in optimizers]
    trained = {n for n, p in named if p.requires_grad and any(p in group for group in held)}
    if not trained:
        raise ValueError(
            f"{type(pl_module).__name__} has no trainable parameter in an optimizer; unfreeze "
            "some and return them from configure_optimizers"
        )
    network = layers_from_module(pl_module)
    if rule.groups is not None:
        return [rule.decide(network)] * len(optimizers), []
    network, left_out = without_frozen_tail(network, trained)
    return [rule.decide(part) for part in _parts(network, named, held)], left_out


def _parts(network: Layer, named: Named, held: Sequence[set[Parameter]]) -> list[Layer]:
    known = {p.name for p in network.all_parameters()}
    names = [{n for n, p in named if p in group and n in known} for group in held]
    if len(held) == 1 or not all(names):
        return [network] * len(held)
    return networks_of(network, names)
