"""The state of the whole model on one rank, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ext.parallel import transport
from lightning_ext.parallel.mesh import Mesh
from lightning_ext.parallel.split import cut, joined
from strategies.parallel.tensor import TensorRule


def whole_state(
    state: Mapping[str, Any],
    stages: Mapping[str, tuple[int, ...]],
    rules: Mapping[str, TensorRule],
    mesh: Mesh,
) -> dict[str, Any]:
    """The state of the unsplit model on rank zero; elsewhere what is here, in whole tensors."""
    here = {
        name: joined(value.detach(), rules.get(name)) if isinstance(value, Tensor) else value
        for name, value in state.items()
        if not (isinstance(value, Tensor) and value.is_meta)
    }
    if mesh.layout.pipeline == 1 or mesh.data_rank or mesh.tensor_rank:
        return here
    merged = dict(here)
    for stage in range(1, mesh.layout.pipeline):
        rank = mesh.stage_rank(stage)
        names = [n for n in state if stages.get(n, (0,))[0] == stage]
        if mesh.stage == stage:
            transport.send(tuple(here[n] for n in names), mesh.stage_rank(0), mesh.pipeline)
        elif mesh.first:
            arrived = transport.receive(rank, mesh.pipeline, mesh.device)
            merged |= {n: t.detach() for n, t in zip(names, arrived, strict=True)}
    return {name: merged[name] for name in state if name in merged}


def pieces(
    state: Mapping[str, Any], root: nn.Module, rules: Mapping[str, TensorRule], mesh: Mesh
) -> dict[str, Any]:
    """Of the state of an unsplit model what this rank holds."""
    own, found = root.state_dict(), dict(state)
    for name, target in own.items():
        value = found.get(name)
        if not isinstance(value, Tensor) or not isinstance(target, Tensor):
            continue
        if target.is_meta and value.shape == target.shape:
            found[name] = target
        elif isinstance(target, DTensor) and value.shape == target.shape:
            split = target.placements[0].is_shard()
            found[name] = cut(value.to(mesh.device), rules.get(name) if split else None, mesh)
    return found


def whole_optimizer(
    optimizer: Any, names: Mapping[int, str], rules: Mapping[str, TensorRule], mesh: Mesh
) -> dict[str, Any]:
    """The state of an optimizer as that of the unsplit model would have it, on rank zero."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    state = optimizer.state_dict()
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state["state"] = {
        index: {
            key: joined(value, rules.get(order[index])) if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
        for index, entries in state["state"].items()
    }
    if mesh.layout.pipeline > 1:
        for stage in range(1, mesh.layout.pipeline):
            source = mesh.stage_rank(stage)
            theirs = transport.share(
                state["state"] if mesh.stage == stage else None, source, mesh.pipeline
            )
            state["state"] = {**theirs, **state["state"]}
    state["state"] = dict(sorted(state["state"].items()))
    return dict(state)


def optimizer_pieces(
    optimizer: Any,
    state: Mapping[str, Any],
    names: Mapping[int, str],
    rules: Mapping[str, TensorRule],
    mesh: Mesh,
) -> dict[str, Any]:
    """Of the state of an optimizer of the unsplit model what this rank holds."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept: dict[int, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        parameter = parameters[index]
        if parameter.is_meta:
            continue
        rule = rules.get(names[id(parameter)])
        split = isinstance(parameter, DTensor) and parameter.placements[0].is_shard()
        kept[index] = {
            key: cut(
                value.to(mesh.device),
                rule if split and value.shape == parameter.shape else None,
                mesh,
            )
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.ndim
            else value
            for key, value in entries.items()
        }
    return {**state, "state": kept}
