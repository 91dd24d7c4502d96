"""What blocks save for the backward pass, read from the tensorflow graph of a training step.

Loaded on the tensorflow backend only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_ext._table import Call, Measured, size_of
from keras_ext.backends.call_state import CallState, raw_values
from keras_ext.backends.graph_obstacles import BACKWARD, Key, Obstacles, key_of
from keras_ext.backends.pure_call import is_float
from strategies.checkpointing.shapes import Shapes

# Writing an element takes as long as this many operations of a matrix product, about.
_ELEMENT = 16
# Operators whose output is their input, in memory.
_VIEWS = {
    "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Squeeze", "StopGradient",
}  # fmt: skip
# Operators whose output is there in any case.
_FREE = {"Const", "Placeholder", "ReadVariableOp", "VarHandleOp"}


@dataclass
class _Seen:
    """A call of a block while the step was traced.

    Args:
        call: To be filled in.
        graph: In which it was traced.
        start: Number of its first operator.
        stop: After its last.
        inputs: That it got.
        outputs: That it returned.
        inside: Number of its first operator after those that take its arguments.
        border: Tensors in which its arguments end and what it returns begins, and losses.
        trained: Handles of variables.
    """

    call: Call
    graph: Any
    start: int
    stop: int
    inputs: list[Any]
    outputs: list[Any]
    inside: int
    border: list[Any]
    trained: list[Any]


@dataclass
class _Steps:
    """A graph, from which operator to which the forward pass goes, and what belongs to whom."""

    operators: list[Any]
    end: int
    owners: list[int]  # number of the call; -1 for code
    scopes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place = {op.name: i for i, op in enumerate(self.operators)}
        for op, owner in zip(self.operators[: self.end], self.owners, strict=False):
            for scope in _scopes(op.name):
                self.scopes[scope] = owner if self.scopes.get(scope, owner) == owner else -1

    def owner(self, tensor: Any) -> int:
        """Number of the call in which a tensor is made."""
        return self.owners[self.place[tensor.op.name]]

    def users(self, tensor: Any) -> set[int]:
        """Calls whose backward pass needs a tensor; -1 for code."""
        found = set()
        for op in tensor.consumers():
            if self.place[op.name] >= self.end and BACKWARD in op.name:
                forward = op.name.split(BACKWARD, 1)[1]
                known = (self.scopes[s] for s in _scopes(forward) if s in self.scopes)
                found.add(next(known, -1))
        return found


class Meter:
    """Measures what blocks, and the code between them, save for the backward pass.

    Args:
        shapes: Of the batch.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._seen: list[_Seen] = []
        self._between = 0
        self._forward: float | None = None
        self._advice = ["Bytes are read from the graph of a step; a compiler may need less"]

    def measured(self) -> Measured | None:
        """What the step told, or none if no block took part that can be run again."""
        calls = [seen.call for seen in self._seen]
        if not calls:
            return None
        return Measured(calls, self._between, self._shapes, (*self._advice,), self._forward)

    def call(
        self,
        layer: keras.Layer,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a block and note what becomes of it in the graph."""
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        # What goes through an attribute may be the same tensor as an argument, or as the output.
        args, kwargs = taken = _copied((args, kwargs))
        inside = len(graph.get_operations())
        output = _copied(call(*args, **kwargs))
        stop = len(graph.get_operations())
        inputs, outputs = _tensors_in(taken), _tensors_in(output)
        border = [*inputs, *outputs, *_tensors_in(layer.losses)]
        trained = [value.handle for value in raw_values(layer.trainable_variables)]
        self._seen.append(
            _Seen(Call(name), graph, start, stop, inputs, outputs, inside, border, trained)
        )
        return output

    def read(self, graph: Any, dense: bool, refuse: Callable[[str, str], None]) -> None:
        """Fill in what the graph of the step tells.

        Args:
            graph: Of a plain step.
            dense: Whether gradients for some rows of a variable may become those for all.
            refuse: Gets the name of a block that cannot be run again, and why.
        """
        operators = graph.get_operations()
        for name, why in self._leave_out(graph, Obstacles(graph, dense)).items():
            self._advice.append(f"{name} is not run again, as it {why}")
            refuse(name, f"it {why}")
        owners = [-1] * len(operators)
        for number, seen in enumerate(self._seen):
            owners[seen.start : seen.stop] = [number] * (seen.stop - seen.start)
        end = next((i for i, op in enumerate(operators) if BACKWARD in op.name), len(operators))
        self._forward = float(sum(map(_cost, operators[:end])))
        steps = _Steps(operators, end, owners)
        needed: dict[Key, tuple[Any, set[int]]] = {}
        for op in operators[:end]:
            for tensor in op.outputs:
                users = steps.users(tensor)
                root = _root(tensor)
                if users and root.op.type not in _FREE and tensor.dtype != tf.resource:
                    needed.setdefault(key_of(root), (root, set()))[1].update(users)
        self._attribute(steps, needed)

    def _leave_out(self, graph: Any, obstacles: Obstacles) -> dict[str, str]:
        """Forget calls of blocks that cannot be run again; their names, and why that is."""
        # Where a step makes variables, it is traced twice.
        inside = [seen for seen in self._seen if seen.graph is graph]
        elsewhere = {seen.call.name for seen in self._seen} - {seen.call.name for seen in inside}
        found = dict.fromkeys(elsewhere, "is called inside another graph")
        for seen in inside:
            why = obstacles.of(seen.inside, seen.stop, seen.border, seen.trained)
            if why is not None:
                found.setdefault(seen.call.name, why)
        self._seen = [seen for seen in inside if seen.call.name not in found]
        return found

    def _attribute(self, steps: _Steps, needed: dict[Key, tuple[Any, set[int]]]) -> None:
        returned = {
            key_of(_root(tensor)): number
            for number, seen in enumerate(self._seen)
            for tensor in seen.outputs
        }
        outside: dict[Key, Any] = {}
        for number, seen in enumerate(self._seen):
            inputs = [_root(tensor) for tensor in seen.inputs]
            call = seen.call
            call.linked = (
                bool(inputs) and number > 0 and returned.get(key_of(inputs[0])) == number - 1
            )
            for root in inputs[1:] if call.linked else inputs:
                if root.op.type not in _FREE:
                    outside[key_of(root)] = root
            _, users = needed.get(key_of(inputs[0]), (None, set())) if inputs else (None, set())
            call.saves_input = number in users
            call.cost = float(sum(map(_cost, steps.operators[seen.start : seen.stop])))
            if seen.outputs:
                call.output = _bytes(_root(seen.outputs[0]), 0)
        for key, (root, users) in needed.items():
            owner = steps.owner(root)
            if owner < 0 or (key in returned and self._used_elsewhere(owner, users)):
                outside[key] = root
            elif key in returned and key == key_of(_root(self._seen[owner].outputs[0])):
                self._seen[owner].call.saves_output = owner in users
            else:
                self._seen[owner].call.saved += _bytes(root, self._seen[owner].call.output)
        self._between = self._spread(steps, outside, returned)

    def _used_elsewhere(self, owner: int, users: set[int]) -> bool:
        """Whether what a call returned is needed by anything but itself and the next call."""
        following = self._seen[owner + 1].call if owner + 1 < len(self._seen) else None
        linked = following is not None and following.linked
        return bool(users - {owner, owner + 1 if linked else owner})

    def _spread(self, steps: _Steps, outside: dict[Key, Any], returned: dict[Key, int]) -> int:
        """Give what is held outside of blocks to the calls that follow; what is after the last."""
        rest = 0
        for key, root in outside.items():
            if key in returned:
                self._seen[returned[key]].call.held = True
            place = steps.place[root.op.name]
            following = [seen for seen in self._seen if seen.start > place]
            if following:
                following[0].call.before += _bytes(root, 0)
            else:
                rest += _bytes(root, 0)
        return rest


def _copied(tree: Any) -> Any:
    flat = keras.tree.flatten(tree)
    copies = [tf.identity(x) if is_float(x) else x for x in flat]
    CallState(flat).mark(copies)
    return keras.tree.pack_sequence_as(tree, copies)


def _tensors_in(tree: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(tree) if tf.is_tensor(leaf)]


def _scopes(name: str) -> Iterator[str]:
    """Scopes of an operator, from the innermost to the outermost."""
    while "/" in name:
        name = name.rsplit("/", 1)[0]
        yield name


def _root(tensor: Any) -> Any:
    """The tensor whose memory a tensor has."""
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _elements(tensor: Any) -> int:
    dims = tensor.shape.as_list() if tensor.shape.rank is not None else []
    return math.prod(dim or 1 for dim in dims)


def _bytes(tensor: Any, of_list: int) -> int:
    """Bytes of a tensor; what loops pile up says nothing, and is as large as the output, about."""
    if tensor.dtype == tf.variant:
        return of_list
    return size_of((_elements(tensor),), tensor.dtype.name)


def _cost(op: Any) -> float:
    if op.type in _FREE | _VIEWS or not op.outputs:
        return 0
    elements = sum(map(_elements, op.outputs))
    if op.type in {"MatMul", "BatchMatMulV2"}:
        inner = op.inputs[0].shape[-2 if _transposed(op) else -1]
        return 2 * elements * (inner or 1)
    if op.type in {"Conv1D", "Conv2D", "Conv3D"}:
        return 2 * elements * _elements(op.inputs[1]) / (op.inputs[1].shape[-1] or 1)
    if op.type == "DepthwiseConv2dNative":
        return 2 * elements * math.prod(op.inputs[1].shape[:2])
    if op.type == "Einsum":
        labels = op.get_attr("equation").decode().split("->")[0].split(",")
        sizes = {
            label: dim or 1
            for names, x in zip(labels, op.inputs, strict=True)
            for label, dim in zip(names, x.shape.as_list(), strict=False)
        }
        return 2 * math.prod(sizes.values())
    return _ELEMENT * elements


def _transposed(op: Any) -> bool:
    return bool(op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x"))
