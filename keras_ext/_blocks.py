"""Blocks of a functional model: what its names or its graph say belongs together.

A flat functional model, as those of `keras.applications`, holds hundreds of layers side by side.
Learning rates should fall from block to block, not from convolution to convolution.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import keras

from keras_ext.backends.internals import calls
from strategies.learning_rate import Layer

# conv2_block1_1_conv, block_1_expand, block1a_dwconv, stage_0_block_0_layernorm; and the
# inverted residuals of MobileNet: expanded_conv_depthwise, expanded_conv_1_expand.
_BLOCK_NAME = re.compile(r"^.*?(?:block_?\d+[a-z]?|expanded_conv(?:_\d+)?)(?=_|$)", re.IGNORECASE)


@dataclass(frozen=True)
class _Step:
    """A layer at its last use, and the stretch of the graph in which it stands."""

    tree: Layer
    stretch: int
    branches: bool

    @property
    def block_name(self) -> str | None:
        match = _BLOCK_NAME.match(self.tree.short_name)
        return match.group() if match else None


def group_blocks(model: keras.Model, prefix: str, trees: dict[int, Layer]) -> list[Layer]:
    """Put the layers of a functional model in order, those of one block under one node.

    Names decide where they speak of blocks (`conv2_block1_1_conv`). Otherwise the graph does: a
    residual or inception branch that leaves from one tensor and ends in one is a block, and an
    attention branch takes the branches up to the next attention with it.

    Args:
        model: A functional model.
        prefix: What the names of its layers start with.
        trees: Tree of each layer with parameters, by the layer's `id`.

    Returns:
        Children of the model, from the input to the output.
    """
    steps = _steps(model, trees)
    groups = _by_name(steps)
    if not any(len(group) > 1 for group in groups):
        groups = _by_graph(steps)
    children = [layer for group in groups for layer in _as_block(prefix, group)]
    in_graph = {id(node.operation) for node in calls(model)}
    unused = [tree for key, tree in trees.items() if key not in in_graph]
    return _in_lists(prefix, children) + unused


def _steps(model: keras.Model, trees: dict[int, Layer]) -> list[_Step]:
    nodes = list(calls(model))
    stretches, branching, weighted = _stretches(nodes, set(trees))
    last_call = {id(node.operation): i for i, node in enumerate(nodes)}
    steps = []
    for i, node in enumerate(nodes):
        tree = trees.get(id(node.operation))
        if tree is None or last_call[id(node.operation)] != i:
            continue
        if tree.role == "embedding" and any(id(parent) in weighted for parent in node.parent_nodes):
            # The table at the input that is used again as the output projection.
            tree = replace(tree, name=f"{tree.name}/reused", role="layer")
        steps.append(_Step(tree, stretches[i], stretches[i] in branching))
    return steps


def _stretches(
    nodes: Sequence[Any], with_weights: set[int]
) -> tuple[list[int], set[int], set[int]]:
    """Cut the graph wherever a single tensor leads on.

    Returns:
        Number of the stretch of each node; the stretches that leave from one tensor and branch;
        and the `id`s of the nodes whose results depend on weights. Masks and positions come from
        the inputs alone, so that reading them all along the model does not hinder a cut.
    """
    last_read = {id(parent): i for i, node in enumerate(nodes) for parent in node.parent_nodes}
    weighted: set[int] = set()
    waiting: set[int] = set()
    stretches: list[int] = []
    branching: set[int] = set()
    stretch = begin = 0
    entered = False
    for i, node in enumerate(nodes):
        stretches.append(stretch)
        parents = {id(parent) for parent in node.parent_nodes}
        if id(node.operation) in with_weights or parents & weighted:
            weighted.add(id(node))
            waiting.add(id(node))
        waiting = {key for key in waiting if last_read.get(key, -1) > i}
        if len(waiting) > 1:
            continue
        if entered and i > begin:
            branching.add(stretch)
        stretch, begin, entered = stretch + 1, i + 1, bool(waiting)
    return stretches, branching, weighted


def _by_name(steps: Sequence[_Step]) -> list[list[_Step]]:
    """Groups of steps named after one block; a nameless one joins those it branches with."""
    named_in: dict[int, set[str]] = {}
    for step in steps:
        if step.branches and step.block_name:
            named_in.setdefault(step.stretch, set()).add(step.block_name)
    groups: list[list[_Step]] = []
    current = None
    for step in steps:
        names = named_in.get(step.stretch, set())
        name = step.block_name or (next(iter(names)) if len(names) == 1 else None)
        if name is not None and name == current:
            groups[-1].append(step)
        else:
            groups.append([step])
        current = name
    return groups


def _by_graph(steps: Sequence[_Step]) -> list[list[_Step]]:
    """Groups of steps that branch off together."""
    stretches = [list(group) for _, group in groupby(steps, key=lambda step: step.stretch)]
    sizes = [_weight_layers(group) for group in stretches if group[0].branches]
    # Where one skip spans most of the model, as in a U-Net, it says nothing of blocks.
    if len(sizes) < 2 or 2 * max(sizes) > _weight_layers(steps):
        return [[step] for step in steps]
    groups: list[list[_Step]] = []
    norms: list[_Step] = []  # on hold: inside a block if one of its branches follows
    after_attention = False
    for group in stretches:
        branches = group[0].branches
        attends = branches and any("attention" in step.tree.kind.lower() for step in group)
        if after_attention and branches and not attends:
            groups[-1] += [*norms, *group]
            norms = []
        elif after_attention and not _weight_layers(group):
            norms += group
        else:
            groups += [[norm] for norm in norms]
            groups += [group] if branches else [[step] for step in group]
            norms, after_attention = [], attends
    return groups + [[norm] for norm in norms]


def _weight_layers(steps: Sequence[_Step]) -> int:
    return sum(step.tree.weight_layers for step in steps)


def _as_block(prefix: str, group: Sequence[_Step]) -> list[Layer]:
    trees = tuple(step.tree for step in group)
    if len(trees) == 1 or _weight_layers(group) < 2:
        return list(trees)
    name = group[0].block_name or trees[0].short_name
    return [Layer(f"{prefix}{name}", "block", children=trees)]


def _in_lists(prefix: str, layers: Sequence[Layer]) -> list[Layer]:
    """Put equal blocks that follow one another, norms aside, into a list as torch models do."""
    result: list[Layer] = []
    run: list[Layer] = []
    for layer in [*layers, None]:
        if (layer is not None and run and layer.role == "norm") or (
            layer is not None and layer.is_composite and run and layer.kind == run[0].kind
        ):
            run.append(layer)
        else:
            several = sum(block.is_composite for block in run) > 1
            result += [Layer(f"{prefix}blocks", "list", "list", children=tuple(run))] * several
            result += [] if several else run
            run = []
            if layer is not None:
                (run if layer.is_composite else result).append(layer)
    return result
