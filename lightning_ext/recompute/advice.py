"""What people should know of how blocks of their model are run: compiled, or in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ext._torch import is_checkpointing, is_compiled
from strategies.checkpointing import Block

# Share of all activations from which on a block has nothing beside it to make room for.
_MOST = 1 / 2


class Checkpoints:
    """Blocks that the model itself runs in `torch.utils.checkpoint`, or that have it inside."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._perhaps: dict[str, None] = {}

    def look(self, name: str) -> None:
        """See whether a checkpoint is open, as a block or one of its layers begins.

        Args:
            name: Of the block.
        """
        if is_checkpointing():
            self.names[name] = None
        elif not torch.is_grad_enabled():  # as in reentrant ones, and elsewhere
            self._perhaps[name] = None

    def settle(self, loss: Tensor) -> None:
        """See whether there were reentrant checkpoints, which stand in the graph.

        Args:
            loss: Of the step.
        """
        if self._perhaps and "CheckpointFunctionBackward" in map(_name, _graph(loss)):
            self.names |= self._perhaps
        self._perhaps = {}

    @property
    def advice(self) -> tuple[str, ...]:
        """What to say of them."""
        if not self.names:
            return ()
        return (
            f"the model itself checkpoints {len(self.names)} blocks (such as "
            f"{next(iter(self.names))}), or parts of them, with torch.utils.checkpoint: these are "
            "run again whatever the budget is. Without that (gradient_checkpointing_disable() in "
            "transformers) the plan decides on them, too",
        )


def compiled_whole(units: Mapping[str, nn.Module], blocks: Iterable[Block]) -> tuple[str, ...]:
    """What to say of a compiled block that holds most of the model.

    Args:
        units: Blocks by name.
        blocks: As they were measured.
    """
    sizes = {block.name: block.saved for block in blocks}
    total = max(sum(sizes.values()), 1)
    return tuple(
        f"{name} was compiled as one and holds {size / total:.0%} of the activations: it can only "
        "be run again as a whole, after which all of it is there at once. Compile its blocks one "
        "by one, with torch.compile(block), so that each can be run again by itself"
        for name, size in sizes.items()
        if size > _MOST * total and name in units and is_compiled(units[name])
    )


def _graph(loss: Tensor) -> Iterator[Any]:
    pending, seen = [loss.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            yield node


def _name(node: Any) -> str:
    return str(node.name())
