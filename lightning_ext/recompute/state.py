"""What a module's forward pass depends on besides its input, put back when it is run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_cuda = torch.backends.cuda
_KERNELS = (
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
)
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
        attention: Which kernels there are for `F.scaled_dot_product_attention`.
    """

    random: Random
    autocast: dict[str, tuple[bool, torch.dtype, bool]]
    attention: tuple[bool, ...]

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
        return cls(random_state(_devices(inputs)), autocast, _attention())

    @contextmanager
    def again(self, grad: bool) -> Iterator[None]:
        """A context in which a call comes out as it did; afterwards all is as it was before.

        Args:
            grad: Whether a graph is made.
        """
        before, attention = random_state(list(self.random[1])), _attention()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, (on, dtype, cached) in self.autocast.items():
                stack.enter_context(
                    torch.amp.autocast(kind, dtype=dtype, enabled=on, cache_enabled=cached)
                )
            set_random_state(self.random)
            _set_attention(self.attention)
            try:
                yield
            finally:
                set_random_state(before)
                _set_attention(attention)


def _attention() -> tuple[bool, ...]:
    return tuple(enabled() for enabled, _ in _KERNELS)


def _set_attention(enabled: tuple[bool, ...]) -> None:
    if enabled != _attention():
        for (_, enable), on in zip(_KERNELS, enabled, strict=True):
            enable(on)
