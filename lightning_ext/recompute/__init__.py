"""Running parts of a model again in the backward pass, in torch."""
