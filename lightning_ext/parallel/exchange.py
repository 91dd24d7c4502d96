"""Gradients of several ranks added up, in few large pieces, also while others are computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_FIRST, _SIZE = 2**20, 25 * 2**20  # bytes sent at once, as in torch's own data parallelism


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Bucket:
    """Gradients that are sent together.

    A gradient that no rank has stays away, so that optimizers skip it.
    """

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self._sent: tuple[Tensor, Any] | None = None

    @property
    def under_way(self) -> bool:
        """Whether it is sent, and not yet back."""
        return self._sent is not None

    def send(self, group: dist.ProcessGroup, late: bool = False) -> None:
        """Begin to add up, and to tell all ranks if one has added to what it had sent before."""
        flat = [
            torch.zeros_like(local(p).data) if p.grad is None else local(p.grad)
            for p in self.parameters
        ]
        said = [*(p.grad is not None for p in self.parameters), late]
        buffer = torch.cat([*(x.reshape(-1) for x in flat), flat[0].new_tensor(said)])
        self._sent = buffer, dist.all_reduce(buffer, group=group, async_op=True)

    def receive(self, divisor: int) -> None:
        """Put the sums, divided, in place of the gradients: as views of what was sent."""
        buffer = self.waited()
        sizes = [local(p).numel() for p in self.parameters]
        *pieces, said = buffer.split([*sizes, len(sizes) + 1])
        present = said[:-1].tolist()
        if divisor > 1:
            buffer.div_(divisor)
        for p, piece, there in zip(self.parameters, pieces, present, strict=True):
            if there:
                _set(p, piece.view_as(local(p)))

    def late(self) -> bool:
        """Whether a rank has added to what it had sent before, once that is back."""
        assert self._sent is not None
        buffer, work = self._sent
        work.wait()
        return bool(buffer[-1])

    def waited(self) -> Tensor:
        """What was sent, once it is back."""
        assert self._sent is not None
        (buffer, work), self._sent = self._sent, None
        work.wait()
        return buffer


def buckets_of(parameters: Iterable[nn.Parameter], first: int = _SIZE) -> list[Bucket]:
    """Parameters of one type each, in order, so many bytes at once.

    Args:
        parameters: To be sent.
        first: Bytes of the first bucket.
    """
    made: list[Bucket] = []
    size, most = 0, first
    for p in parameters:
        if not made or size > most or made[-1].parameters[-1].dtype != p.dtype:
            most = _SIZE if made else first
            made.append(Bucket())
            size = 0
        made[-1].parameters.append(p)
        size += local(p).numel() * p.element_size()
    return made


def add_up(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, divisor: int = 1) -> None:
    """Put sums over a group, divided, in place of gradients; every rank of it has to call this."""
    buckets = buckets_of(parameters)
    for bucket in buckets:
        bucket.send(group)
    for bucket in buckets:
        bucket.receive(divisor)


class Overlap:
    """Takes means over a group while the backward pass goes on.

    A bucket is sent once the gradients in it are complete, the last layers first, and the last
    bucket after the backward pass. Code that runs backward passes of its own may add to a gradient
    that is sent already, which a rank says in the last bucket: then all ranks add up again what
    they have, and from then on after the backward pass.

    Args:
        group: Of the copies.

    Source: Li et al., PyTorch Distributed (arXiv 2006.15704), section 3.2.3.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, dist.get_world_size(group)
        self.off = self.size == 1
        self._buckets: list[Bucket] = []
        self._place: dict[int, int] = {}

    @contextmanager
    def during(self, parameters: Sequence[nn.Parameter], count: int) -> Iterator[None]:
        """The backward passes are in here; after it gradients are means.

        Args:
            parameters: That are trained.
            count: Backward passes, each of which completes every gradient once.
        """
        self._arrange(parameters)
        left = Counter({i: count * len(b.parameters) for i, b in enumerate(self._buckets)})
        following, late = 0, False

        def arrived(p: Tensor) -> None:
            nonlocal following, late
            place = self._place[id(p)]
            late |= self._buckets[place].under_way
            left[place] -= 1
            while following < len(self._buckets) - 1 and left[following] <= 0:
                self._buckets[following].send(self.group)
                following += 1

        hooks = [p.register_post_accumulate_grad_hook(arrived) for p in parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in self._buckets[following:-1]:
            bucket.send(self.group)
        self._buckets[-1].send(self.group, late)
        self._finish()

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> None:
        """Buckets anew where other parameters are trained than before."""
        if self._place.keys() != {id(p) for p in parameters}:
            self._buckets = buckets_of(reversed(parameters), _FIRST)
            self._place = {id(p): i for i, b in enumerate(self._buckets) for p in b.parameters}

    def _finish(self) -> None:
        self.off = self._buckets[-1].late()
        for bucket in self._buckets:
            if self.off:
                bucket.waited()
                bucket.send(self.group)
            bucket.receive(self.size)


def _set(p: nn.Parameter, piece: Tensor) -> None:
    if isinstance(p, DTensor):
        p.grad = DTensor.from_local(
            piece, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
    else:
        p.grad = piece
