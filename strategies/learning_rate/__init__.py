"""Learning-rate rules: which parameter learns how fast."""

from strategies.learning_rate.depth import parameter_depths
from strategies.learning_rate.layerwise import (
    LayerwiseDecay,
    LayerwiseRates,
    layerwise_multipliers,
)
from strategies.learning_rate.structure import Layer, Parameter, layers_from_names

__all__ = [
    "Layer",
    "LayerwiseDecay",
    "LayerwiseRates",
    "Parameter",
    "layers_from_names",
    "layerwise_multipliers",
    "parameter_depths",
]
