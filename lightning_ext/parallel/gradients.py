"""Gradients of all ranks: their mean over the data axis, sums over stages, and their norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ext.parallel.exchange import Overlap, add_up, local
from lightning_ext.parallel.mesh import Mesh


class Gradients:
    """The gradients of what this rank holds.

    Args:
        mesh: The ranks.
        own: Parameters that only this stage holds.
        shared: Parameters that several stages hold, by these stages: tied weights, and what is
            outside the pipelined module.
        groups: Of the ranks of these stages.
    """

    def __init__(
        self,
        mesh: Mesh,
        own: Sequence[nn.Parameter],
        shared: dict[tuple[int, ...], list[nn.Parameter]],
        groups: dict[tuple[int, ...], dist.ProcessGroup],
    ) -> None:
        self.mesh, self.own, self.shared, self.groups = mesh, list(own), shared, groups
        # The order in which buckets are sent must not depend on what else is sent on a group.
        copies = mesh.group(mesh.layout.groups("data")) if mesh.layout.data > 1 else mesh.data
        self._overlap = Overlap(copies)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that this rank holds and trains, which may change from step to step."""
        held = [*self.own, *(p for group in self.shared.values() for p in group)]
        return [p for p in held if p.requires_grad]

    def take(self) -> list[Tensor | None]:
        """Take the gradients away."""
        taken = [_like(p) for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        return taken

    def put(self, gradients: Iterable[Tensor | None]) -> None:
        """Put gradients in place of what is there."""
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient

    def add(self, gradients: Iterable[Tensor | None], factor: Tensor) -> None:
        """Add gradients times a factor."""
        # One pass over memory less where it costs nothing to look.
        scaled = factor.device.type != "cpu" or float(factor) != 1.0
        for p, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if scaled:
                local(gradient).mul_(factor)
            if p.grad is None:
                p.grad = gradient
            else:
                local(p.grad).add_(local(gradient))

    @contextmanager
    def meant(self, count: int, wanted: bool) -> Iterator[bool]:
        """The backward passes of a step are in here, with gradients that are all of this step.

        Args:
            count: Of microbatches.
            wanted: Whether this step ends with the mean over the data axis.

        Yields:
            Whether what only this stage holds is the mean afterwards.
        """
        parameters = [p for p in self.own if p.requires_grad]
        # The pieces of a gradient have to be put in order first where tensors are split.
        if self._overlap.off or not (wanted and parameters) or self.mesh.layout.tensor > 1:
            yield False
            return
        with self._overlap.during(parameters, count):
            yield True

    def sum_over_stages(self) -> None:
        """Add up what the stages that share a parameter have found."""
        for stages, parameters in self.shared.items():
            if len(stages) > 1:
                add_up([p for p in parameters if p.requires_grad], self.groups[stages])

    def mean_over_data(self, meant: bool) -> None:
        """Take the mean over the data axis.

        Args:
            meant: Whether what only this stage holds is the mean already.
        """
        done = {id(p) for p in self.own} if meant else ()
        rest = [p for p in self.parameters if id(p) not in done]
        if self.mesh.layout.data > 1 and rest:
            add_up(rest, self.mesh.data, self.mesh.layout.data)

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The 2-norm of the gradients of some parameters, over all stages and pieces."""
        asked = {id(p) for p in parameters}
        first = self.mesh.stage
        mine = [p for p in self.own if id(p) in asked]
        for stages, group in self.shared.items():
            mine += [p for p in group if id(p) in asked and stages[0] == first]
        squares = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for p in mine:
            if p.grad is not None:
                split = isinstance(p.grad, DTensor) and p.grad.placements[0].is_shard()
                square = torch.linalg.vector_norm(local(p.grad), dtype=torch.float64) ** 2
                squares[int(split)] += square
        if self.mesh.layout.tensor > 1:
            dist.all_reduce(squares[1:], group=self.mesh.tensor.get_group())
        total = squares.sum()
        if self.mesh.layout.pipeline > 1:
            dist.all_reduce(total, group=self.mesh.pipeline)
        return total.sqrt()

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> None:
        """Scale the gradients so that their norm is at most `limit`, as torch does."""
        factor = (limit / (self.norm(parameters) + 1e-6)).clamp(max=1.0)
        for p in parameters:
            if p.grad is not None:
                gradient = local(p.grad)
                gradient.mul_(factor.to(gradient.dtype))


def clip_together(plugin: Any, gradients: Gradients) -> None:
    """Let a precision plug-in of Lightning clip the gradients of all ranks as one.

    It would take the norm of this rank's alone; and torch's clipping of values refuses split and
    whole tensors in one call.
    """

    def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
        gradients.clip(list(plugin.main_params(optimizer)), clip_val)

    def clip_grad_by_value(optimizer: Any, clip_val: float) -> None:
        for p in plugin.main_params(optimizer):
            if p.grad is not None:
                local(p.grad).clamp_(-clip_val, clip_val)

    plugin.clip_grad_by_norm = clip_grad_by_norm
    plugin.clip_grad_by_value = clip_grad_by_value


def gradients_of(root: nn.Module, stages: Mapping[str, tuple[int, ...]], mesh: Mesh) -> Gradients:
    """The gradients of what this rank holds; every rank has to call this.

    Args:
        root: The model, with what other stages hold on the meta device.
        stages: That hold each parameter, by name.
        mesh: The ranks.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for several in sorted(set(stages.values())):
        groups[several] = mesh.pipeline
        if 1 < len(several) < mesh.layout.pipeline:
            lines = mesh.layout.groups("pipeline")
            ranks = [[line[stage] for stage in several] for line in lines]
            groups[several] = mesh.group(ranks)
    own: list[nn.Parameter] = []
    shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for name, parameter in root.named_parameters():
        if mesh.stage in stages[name]:
            alone = len(stages[name]) == 1
            (own if alone else shared.setdefault(stages[name], [])).append(parameter)
    return Gradients(mesh, own, {several: shared[several] for several in sorted(shared)}, groups)


def _like(p: nn.Parameter) -> Tensor | None:
    """The gradient, cut as its parameter is."""
    if isinstance(p.grad, DTensor) and isinstance(p, DTensor):
        return p.grad.redistribute(placements=p.placements)
    return p.grad


class Deposit(torch.autograd.Function):
    """A loss whose backward pass brings gradients that were computed before.

    Lightning calls `training_step`, then `zero_grad`, then `backward`: what a pipeline computes
    inside `training_step` has to wait until then.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, bring: Any) -> Tensor:
        """The loss."""
        ctx.bring = bring
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Bring the gradients, times that of the loss."""
        ctx.bring(grads[0])
        return torch.zeros_like(grads[0]), None, None
