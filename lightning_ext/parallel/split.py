"""Which parameters this rank holds: those of its stage, cut over the tensor axis, and no others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_ext.parallel.mesh import Mesh
from lightning_ext.parallel.parts import PipelinePart
from lightning_ext.parallel.region import make_region, set_sections
from strategies.parallel import TensorPlan
from strategies.parallel.tensor import TensorRule


def owners(root: nn.Module, stages: Sequence[Sequence[PipelinePart]]) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter and buffer, by name.

    What is outside the pipelined module, and buffers that belong to none of its parts, are held by
    all of them.
    """
    place: dict[int, set[int]] = defaultdict(set)
    for stage, parts in enumerate(stages):
        for tensor in _tensors(parts):
            place[id(tensor)].add(stage)
    every = range(len(stages))
    named = [
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ]
    return {name: tuple(sorted(place.get(id(tensor), every))) for name, tensor in named}


def _of(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _tensors(parts: Iterable[PipelinePart]) -> Iterable[Tensor]:
    for part in parts:
        for owner in part.owned:
            if isinstance(owner, nn.Module):
                yield from _of(owner)
            else:
                yield owner


def drop_foreign(root: nn.Module, stages: dict[str, tuple[int, ...]], stage: int) -> None:
    """Put in place of what other stages hold tensors without memory, of the same name."""
    # What is tied stays so, or optimizers would count other parameters than those of one process.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for prefix, module in root.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, tensor in own:
            if stage in stages[f"{prefix}.{key}".lstrip(".")]:
                continue
            if id(tensor) not in made:
                empty = torch.empty_like(tensor, device="meta")
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, tensor.requires_grad)
                made[id(tensor)] = tensor, empty
            setattr(module, key, made[id(tensor)][1])


def split_tensors(root: nn.Module, plan: TensorPlan, mesh: Mesh) -> dict[str, TensorRule]:
    """Cut the parameters that the plan names, and make its regions.

    Returns:
        The rule of each parameter that is cut, by name.
    """
    modules, rules = dict(root.named_modules()), {}
    done: dict[int, nn.Parameter] = {}
    for path, rule in plan.rules.items():
        for key, parameter in list(modules[path].named_parameters(recurse=False)):
            rules[f"{path}.{key}"] = rule
            if parameter.is_meta:
                continue
            if id(parameter) not in done:
                whole = key != "weight" and rule.dim == 1
                done[id(parameter)] = nn.Parameter(
                    cut(parameter.data, None if whole else rule, mesh), parameter.requires_grad
                )
            setattr(modules[path], key, done[id(parameter)])
        if rule.sections > 1:
            modules[path].register_forward_hook(_remember(rule.sections))
    for path in plan.regions:
        make_region(modules[path], mesh.tensor)
    return rules


def _remember(sections: int) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
        if isinstance(output, DTensor):
            set_sections(output, sections)
        return output

    return hook


def cut(whole: Tensor, rule: TensorRule | None, mesh: Mesh) -> DTensor:
    """This rank's piece of a tensor; without a rule, all of it."""
    if rule is None or not whole.ndim:
        return distribute_tensor(whole, mesh.tensor, [Replicate()])
    dim = min(rule.dim, whole.ndim - 1)
    if rule.sections > 1:
        ranks = mesh.layout.tensor
        pieces = [s.chunk(ranks, dim) for s in whole.chunk(rule.sections, dim)]
        whole = torch.cat([s[rank] for rank in range(ranks) for s in pieces], dim)
    return distribute_tensor(whole, mesh.tensor, [Shard(dim)])


def joined(piece: Tensor, rule: TensorRule | None) -> Tensor:
    """The whole of a tensor in the order of the unsplit model; every tensor rank has to call it."""
    if not isinstance(piece, DTensor):
        return piece
    whole = piece.full_tensor()
    sharded = piece.placements[0].is_shard()
    if rule is None or rule.sections == 1 or not sharded:
        return whole
    dim = min(rule.dim, whole.ndim - 1)
    ranks = [r.chunk(rule.sections, dim) for r in whole.chunk(piece.device_mesh.size(), dim)]
    return torch.cat([r[section] for section in range(rule.sections) for r in ranks], dim)
