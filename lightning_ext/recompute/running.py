"""What is noted while blocks run: what each was given, and what the last one has returned."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_ext._torch import version_of
from lightning_ext.recompute.attributes import Unseen
from lightning_ext.recompute.frames import Call, Frame
from lightning_ext.recompute.tensors import copied, first_of


@dataclass
class Last:
    """The output of the block that ran last, which the next may take.

    Args:
        tensor: That output.
        version: How often it had been written to.
    """

    tensor: weakref.ref[Tensor] | None = None
    version: int = 0

    @classmethod
    def of(cls, output: Any) -> Last:
        """The output of a block that has run."""
        found = first_of(output)
        return cls() if found is None else cls(weakref.ref(found), version_of(found))

    def taken_by(self, args: tuple[Any, ...]) -> bool:
        """Whether the first argument is that output, as it was."""
        if self.tensor is None or not args or not isinstance(args[0], Tensor):
            return False
        return self.tensor() is args[0] and version_of(args[0]) == self.version


@dataclass
class Run:
    """A frame that may go on with the next call.

    Args:
        frame: Its calls.
        stop: Number of the call after its last.
    """

    frame: Frame
    stop: int


@dataclass
class Open:
    """A block that is running.

    Args:
        name: Of it.
        module: It.
        contexts: In which it runs.
        call: In a frame, if it is measured.
        first: Copy of its first argument, if it is measured.
        unseen: Looks for writes, if it is measured.
        error: That was being handled when it began.
    """

    name: str
    module: nn.Module
    contexts: ExitStack
    call: Call | None = None
    first: Tensor | None = None
    unseen: Unseen | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Given:
    """An argument of a block, which others may write to.

    Args:
        name: Of the block.
        call: Number of the call.
        first: Whether it is the first argument.
        tensor: It.
        version: How often it had been written to.
    """

    name: str
    call: int
    first: bool
    tensor: weakref.ref[Tensor]
    version: int


def private(tree: Any, but: Tensor | None) -> Any:
    """Arguments that nobody else writes to; what is one tensor in several places stays one."""
    made: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or tensor is but:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = copied(tensor)
        return made[id(tensor)]

    return tree_map_only(Tensor, copy, tree)
