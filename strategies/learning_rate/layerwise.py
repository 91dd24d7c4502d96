"""Layer-wise decay: the nearer a layer is to the input, the slower it learns."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from strategies.learning_rate.depth import parameter_depths
from strategies.learning_rate.groups import Groups, check_groups
from strategies.learning_rate.names import layers_from_names
from strategies.learning_rate.structure import Layer


def layerwise_multipliers(
    network: Layer | Sequence[str], decay: float = 0.75, groups: Groups | None = None
) -> dict[str, float]:
    """Factor on the learning rate of every parameter: `decay ** (L - d)` at depth `d` of `L`.

    Args:
        network: The tree of layers, or parameter names from the input to the output.
        decay: Ratio between one level and the next, in (0, 1]. Default: 0.75.
        groups: The user's own levels; see `parameter_depths`. Default: None.

    Returns:
        Factor in (0, 1] by parameter name; 1.0 for the head.

    Raises:
        TypeError: `decay` is not a number, or `groups` has the wrong type.
        ValueError: `decay` is outside (0, 1], or `groups` does not fit the network.

    Example:
        >>> layerwise_multipliers(["stem.weight", "body.weight", "fc.weight"], decay=0.5)
        {'stem.weight': 0.25, 'body.weight': 0.5, 'fc.weight': 1.0}

    Source:
        Clark et al., "ELECTRA" (2020), appendix A; Bao et al., "BEiT" (2021), section 3.1;
        He et al., "Masked Autoencoders" (2021), appendix A.1.
    """
    return dict(LayerwiseDecay(decay, groups).decide(network).multipliers)


@dataclass(frozen=True)
class LayerwiseRates:
    """What `LayerwiseDecay` decided.

    Args:
        multipliers: Factor on the learning rate, by parameter name.
        depths: Depth, by parameter name.
        no_weight_decay: Names of parameters that weight decay must leave alone.
        reason: The decision in words.
    """

    multipliers: Mapping[str, float]
    depths: Mapping[str, int]
    no_weight_decay: frozenset[str]
    reason: str

    @property
    def levels(self) -> dict[int, float]:
        """Factor by depth, from the input to the output."""
        by_depth = {depth: self.multipliers[name] for name, depth in self.depths.items()}
        return dict(sorted(by_depth.items()))


@dataclass
class LayerwiseDecay:
    """The rule behind both `LayerwiseLRDecay` callbacks.

    Args:
        decay: Ratio between one level and the next, in (0, 1]. Default: 0.75.
        groups: The user's own levels; see `parameter_depths`. Default: None.
        no_decay_on_bias_and_norm: Whether weight decay leaves biases and norms alone.
            Default: False.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `decay` is outside (0, 1].

    Example:
        >>> rule = LayerwiseDecay(decay=0.5)
        >>> print(rule.decide(["stem.weight", "fc.weight"]).reason)
        2 levels from stem.weight (x0.5) to fc.weight (x1)
    """

    decay: float = 0.75
    groups: Groups | None = None
    no_decay_on_bias_and_norm: bool = False

    def __post_init__(self) -> None:
        decay: object = self.decay
        if isinstance(decay, bool) or not isinstance(decay, Real):
            raise TypeError(f"decay={self.decay!r} must be a number in (0, 1], such as 0.75")
        if math.isnan(self.decay) or not 0 < self.decay <= 1:
            raise ValueError(
                f"decay={self.decay!r} must be in (0, 1]; pass 1.0 for equal rates, 0.65 to 0.9 "
                "to fine-tune"
            )
        if not isinstance(self.no_decay_on_bias_and_norm, bool):
            raise TypeError(
                f"no_decay_on_bias_and_norm={self.no_decay_on_bias_and_norm!r} must be a bool"
            )
        check_groups(self.groups)

    def decide(self, network: Layer | Sequence[str]) -> LayerwiseRates:
        """The factor of every parameter of a network.

        Args:
            network: The tree of layers, or parameter names from the input to the output.

        Raises:
            TypeError: `groups` has the wrong type.
            ValueError: `groups` does not fit the network, or it has no parameters.
        """
        if not isinstance(network, Layer):
            network = layers_from_names(network)
        depths = parameter_depths(network, self.groups)
        top = max(depths.values())
        decay = float(self.decay)
        # Hundreds of levels would underflow to 0, and a factor of 0 is not in (0, 1].
        multipliers = {n: max(decay ** (top - d), sys.float_info.min) for n, d in depths.items()}
        exempt = self._no_weight_decay(network)
        reason = _reason(multipliers, depths)
        if self.no_decay_on_bias_and_norm:
            reason += f"; {len(exempt)} biases and norms without weight decay"
        return LayerwiseRates(multipliers, depths, exempt, reason)

    def _no_weight_decay(self, network: Layer) -> frozenset[str]:
        if not self.no_decay_on_bias_and_norm:
            return frozenset()
        return frozenset(
            p.name
            for layer in network.walk()
            for p in layer.parameters
            if p.is_bias or layer.role == "norm"
        )


def _reason(multipliers: Mapping[str, float], depths: Mapping[str, int]) -> str:
    lowest = min(depths, key=lambda name: depths[name])
    # The last weight of the head says more than the norm before it.
    deepest = max(depths.values())
    top = [name for name, depth in depths.items() if depth == deepest]
    highest = next((name for name in reversed(top) if not name.endswith("bias")), top[-1])
    count = len(set(depths.values()))
    return (
        f"{count} level{'s' * (count != 1)} from {lowest} (x{multipliers[lowest]:.3g}) "
        f"to {highest} (x{multipliers[highest]:.3g})"
    )
