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
        graph: Of a plain step.
        dense: Whether gradients for some rows of a variable may become those for all.
    """

    def __init__(self, graph: Any, dense: bool) -> None:
        self._operators, self._dense = graph.get_operations(), dense
        self._place = {op.name: i for i, op in enumerate(self._operators)}
        self._handles = {id(outer): inner for outer, inner in graph.captures}
        self._trained: set[str] = set()  # operators that gradients of variables come through
        for op in self._operators:
            if op.type != "StopGradient" and any(map(self._carries, op.inputs)):
                self._trained.add(op.name)

    def _carries(self, tensor: Any) -> bool:
        """Whether a gradient may flow through a tensor to a variable."""
        if tensor.dtype == tf.resource:
            return True
        real = tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype == tf.variant
        return bool(real and tensor.op.name in self._trained)

    def of(
        self, start: int, stop: int, border: Sequence[Any], trained: Sequence[Any]
    ) -> str | None:
        """What keeps a block from being run again, as a verb and its object, or none.

        Args:
            start: Number of its first operator.
            stop: After its last.
            border: Tensors that it takes and returns, and losses that it adds.
            trained: Handles of the variables that it trains.
        """
        own, known, later = self._operators[start:stop], set(map(key_of, border)), self._later(stop)
        if kinds := {op.type for op in own if _is_obstacle(op)}:
            return f"has {', '.join(sorted(kinds))}"
        if any(BACKWARD in op.name for op in own):
            return "takes gradients"
        if not self._dense and any(map(_is_lookup, own)):
            return "looks up rows of a variable, whose gradients the optimizer takes row by row"
        if any(self._is_taken(x, start, known) for op in own for x in op.inputs):
            return "takes a tensor that is no argument"
        if any(self._is_handed_out(x, known, later) for op in own for x in op.outputs):
            return "hands out a tensor that it does not return"
        if not all(self._is_used(handle, start, stop) for handle in trained):
            return "does not use all that it trains"  # for which there are no gradients, not zeros
        return None

    def _is_used(self, handle: Any, start: int, stop: int) -> bool:
        inner = self._handles.get(id(handle))
        users = () if inner is None else inner.consumers()
        return any(start <= self._place[op.name] < stop for op in users)

    def _is_taken(self, tensor: Any, start: int, known: set[Key]) -> bool:
        return self._place[tensor.op.name] < start and self._is_undeclared(tensor, known)

    def _is_handed_out(self, tensor: Any, known: set[Key], later: set[str]) -> bool:
        handed = any(op.name in later for op in tensor.consumers())
        return handed and self._is_undeclared(tensor, known)

    def _later(self, stop: int) -> set[str]:
        """Operators of the forward pass after a block."""
        following = self._operators[stop:]
        # Gradients that people define are not named so, but never come first.
        return {op.name for op in takewhile(lambda op: BACKWARD not in op.name, following)}

    def _is_undeclared(self, tensor: Any, known: set[Key]) -> bool:
        # Handles of variables are where they were used first.
        value = tensor.dtype != tf.resource and self._carries(tensor)
        return value and key_of(tensor) not in known


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
