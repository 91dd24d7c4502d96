"""Decisions as plain numbers: no framework object ever enters this package.

A rule takes numbers and names, and returns a frozen decision with a reason that a person can
read. `lightning_ext` and `keras_ext` apply the decisions; everything here runs on numpy alone.

Example:
    >>> from strategies.learning_rate import layerwise_multipliers
    >>> layerwise_multipliers(["embed.weight", "body.weight", "head.weight"], decay=0.5)
    {'embed.weight': 0.25, 'body.weight': 0.5, 'head.weight': 1.0}
"""

from strategies.decisions import Decision, DecisionLog

__all__ = ["Decision", "DecisionLog"]

__version__ = "0.1.0"

# A user's own `strategies/` next to their script shadows this package; the adapters look for
# this marker to tell the two apart.
__distribution__ = "lightning-keras-ext"
