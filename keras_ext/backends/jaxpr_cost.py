"""Operations of a function that jax has traced."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

# Writing an element takes as long as this many operations of a matrix product, about.
_ELEMENT = 16


def cost_of(jaxpr: Any) -> float:
    """Operations of matrix products and convolutions, and of elements that others write.

    Args:
        jaxpr: As `jax.make_jaxpr` returns it.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return float(sum(map(_cost, inner.eqns)))


def _cost(equation: Any) -> float:
    nested = [*_nested(equation.params)]
    if nested:
        return equation.params.get("length", 1) * sum(map(cost_of, nested))
    elements = sum(math.prod(x.aval.shape) for x in equation.outvars)
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * elements * math.prod(equation.invars[0].aval.shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2 * elements * math.prod(kernel) / features
    return _ELEMENT * elements


def _nested(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item
