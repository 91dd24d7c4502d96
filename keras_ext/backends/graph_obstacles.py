"""What keeps a block from being run again, found in the tensorflow graph of a plain training step.

Loaded on the tensorflow backend only. A block that is run again is differentiated by itself: what
it takes and returns is known, and gradients flow through nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import tensorflow as tf

Key = tuple[str, int]  # operator and number of the output
# What gradients are made by; tensorflow names them so.
BACKWARD = "gradient_tape/"
# Operators that are no obstacle, though they have a state.
_HARMLESS = {
    "AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp", "Assert", "If", "PrintV2",
    "ReadVariableOp", "ResourceGather", "VarHandleOp", "While",
}  # fmt: skip
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
# Operators whose gradient has rows for parts of their first input only.
_LOOKUPS = {"GatherNd", "GatherV2", "ResourceGather", "ResourceGatherNd"}
# What leaves a gradient of rows as it is.
_KEEPS_ROWS = {"Cast", "Identity", "IdentityN", "PreventGradient", "ReadVariableOp"}


class Obstacles:
    """Looks for what keeps blocks from being run again.

    Args:
        operators: Of the graph, in order.
        dense: Whether gradients for some rows of a variable may become those for all.
    """

    def __init__(self, operators: Sequence[Any], dense: bool) -> None:
        self._operators, self._dense = operators, dense
        self._place = {op.name: i for i, op in enumerate(operators)}
        self._trained: set[str] = set()  # operators that gradients of variables come through
        for op in operators:
            if op.type != "StopGradient" and any(map(self._carries, op.inputs)):
                self._trained.add(op.name)

    def _carries(self, tensor: Any) -> bool:
        """Whether a gradient may flow through a tensor to a variable."""
        if tensor.dtype == tf.resource:
            return True
        real = tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype == tf.variant
        return bool(real and tensor.op.name in self._trained)

    def of(
        self, start: int, stop: int, taken: Sequence[Any], returned: Sequence[Any]
    ) -> str | None:
        """What keeps a block from being run again, as a verb and its object, or none.

        Args:
            start: Number of its first operator.
            stop: After its last.
            taken: Tensors that it takes.
            returned: Those that it returns.
        """
        own = self._operators[start:stop]
        if kinds := {op.type for op in own if _is_obstacle(op)}:
            return f"has {', '.join(sorted(kinds))}"
        if any(BACKWARD in op.name for op in own):
            return "takes gradients"
        if not self._dense and any(map(_is_lookup, own)):
            return "looks up rows of a variable, whose gradients the optimizer takes row by row"
        known = {key_of(x) for x in taken}
        if any(self._is_taken(x, start, known) for op in own for x in op.inputs):
            return "takes a tensor that is no argument"
        known, later = {key_of(x) for x in returned}, self._later(stop)
        if any(self._is_handed_out(x, known, later) for op in own for x in op.outputs):
            return "hands out a tensor that it does not return"
        return None

    def _is_taken(self, tensor: Any, start: int, known: set[Key]) -> bool:
        before = self._place[tensor.op.name] < start
        return before and self._is_undeclared(tensor, known)

    def _is_handed_out(self, tensor: Any, known: set[Key], later: set[str]) -> bool:
        handed = any(op.name in later for op in tensor.consumers())
        return handed and self._is_undeclared(tensor, known)

    def _is_undeclared(self, tensor: Any, known: set[Key]) -> bool:
        # Handles of variables are where they were used first.
        value = tensor.dtype != tf.resource and self._carries(tensor)
        return value and key_of(tensor) not in known

    def _later(self, stop: int) -> set[str]:
        """Operators of the forward pass after a block."""
        following = self._operators[stop:]
        # Gradients that people define are not named so, but never come first.
        return {op.name for op in takewhile(lambda op: BACKWARD not in op.name, following)}


def key_of(tensor: Any) -> Key:
    """What a tensor is known by in its graph."""
    return tensor.op.name, tensor.value_index


def _is_obstacle(op: Any) -> bool:
    # Functions of tensorflow keep what they were traced with, and so values of the first call.
    return op.type in _CALLS or (op.op_def.is_stateful and op.type not in _HARMLESS)


def _is_lookup(op: Any) -> bool:
    if op.type not in _LOOKUPS:
        return False
    source = op.inputs[0]
    while source.op.type in _KEEPS_ROWS and source.dtype != tf.resource:
        source = source.op.inputs[0]
    return bool(source.dtype == tf.resource)
