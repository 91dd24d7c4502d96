"""What a module's forward pass depends on besides its input, put back when it is run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Random = tuple[Tensor, dict[int, Tensor]]


def _devices(tensors: tuple[Tensor, ...]) -> list[int]:
    return sorted({t.get_device() for t in tensors if t.is_cuda})


def random_state(devices: list[int]) -> Random:
    """Random state of the CPU and of some GPUs."""
    return torch.get_rng_state(), {d: torch.cuda.get_rng_state(d) for d in devices}


def set_random_state(state: Random) -> None:
    """Put random states back."""
    torch.set_rng_state(state[0])
    for device, own in state[1].items():
        torch.cuda.set_rng_state(own, device)


@dataclass(frozen=True)
class Surroundings:
    """Random state and autocast at the start of a call.

    Args:
        random: Of the CPU, and of the GPUs that the inputs are on.
        autocast: By type of device: whether it is on, its dtype, whether it caches.
    """

    random: Random
    autocast: dict[str, tuple[bool, torch.dtype, bool]]

    @classmethod
    def now(cls, inputs: tuple[Tensor, ...]) -> Surroundings:
        """Those of a call with these tensors."""
        kinds = {"cpu", *(t.device.type for t in inputs)}
        cached = torch.is_autocast_cache_enabled()
        autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached)
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        }
        return cls(random_state(_devices(inputs)), autocast)

    @contextmanager
    def again(self, grad: bool) -> Iterator[None]:
        """A context in which a call comes out as it did; afterwards all is as it was before.

        Args:
            grad: Whether a graph is made.
        """
        before = random_state(list(self.random[1]))
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, (on, dtype, cached) in self.autocast.items():
                stack.enter_context(
                    torch.amp.autocast(kind, dtype=dtype, enabled=on, cache_enabled=cached)
                )
            set_random_state(self.random)
            try:
                yield
            finally:
                set_random_state(before)
