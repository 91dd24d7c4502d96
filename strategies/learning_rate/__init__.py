"""Learning-rate rules: which parameter learns how fast."""

from strategies.learning_rate.depth import parameter_depths
from strategies.learning_rate.groups import Groups
from strategies.learning_rate.layerwise import (
    LayerwiseDecay,
    LayerwiseRates,
    layerwise_multipliers,
)
from strategies.learning_rate.names import layers_from_names
from strategies.learning_rate.parts import networks_of, without_frozen_tail
from strategies.learning_rate.structure import Layer, Parameter

__all__ = [
    "Groups",
    "Layer",
    "LayerwiseDecay",
    "LayerwiseRates",
    "Parameter",
    "layers_from_names",
    "layerwise_multipliers",
    "networks_of",
    "parameter_depths",
    "without_frozen_tail",
]
