"""Which blocks a user's arguments leave, and why there may be none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_ext.recompute.runner import Runner
from lightning_ext.recompute.units import chosen, free_units, missing, units_of, without
from strategies.checkpointing.kinds import did_you_mean


def select(
    model: nn.Module, blocks: Sequence[Any] | None, exclude: Sequence[Any]
) -> tuple[dict[str, nn.Module], str]:
    """The blocks of a model that may be run again, by name.

    Args:
        model: With its layers.
        blocks: Classes and names, or none for those that are found.
        exclude: Classes and names of what is left alone.

    Returns:
        The blocks, and what to say if there are none.

    Raises:
        ValueError: The model does not have one of these.
    """
    for name, kinds in (("blocks", blocks or ()), ("exclude", exclude)):
        if (kind := missing(model, kinds)) is not None:
            known = [name for name, _ in model.named_modules() if name]
            raise ValueError(
                f"{name}={list(kinds)!r}: the module has none that is {kind!r}; pass classes of "
                f"its modules, or names as in named_modules(){did_you_mean(kind, known)}"
            )
    found = units_of(model) if blocks is None else chosen(model, blocks)
    left = without(found, chosen(model, exclude).values())
    usable = free_units(model, left)
    if usable:
        return usable, ""
    if left:
        why = (
            "all of the model is inside what was compiled; compile its blocks one by one, with "
            "torch.compile(block)"
        )
    elif found:
        why = (
            f"exclude= leaves none of its {len(found)} blocks (such as {next(iter(found))}); "
            "exclude less, or name smaller parts in blocks="
        )
    else:
        why = (
            "the module has no modules of its own to run again; put repeated parts into modules, "
            "and name them in blocks= where they are not found"
        )
    return {}, f"nothing can be run again, as {why}"


def never_seen(runner: Runner) -> str:
    """What to say where a step had a backward pass that needed nothing of the blocks.

    Args:
        runner: Stands beside them.
    """
    if runner.checkpoints.names:
        why = (
            f"its blocks (such as {next(iter(runner.checkpoints.names))}) run inside of "
            "checkpoints of its own; turn these off, in transformers with "
            "gradient_checkpointing_disable()"
        )
    else:
        why = (
            f"the backward pass needs nothing of its {len(runner.units)} blocks (such as "
            f"{next(iter(runner.units))}): they are frozen, or not called as modules. Name in "
            "blocks= those that are, and leave what is trained out of exclude="
        )
    return f"nothing is run again, as {why}"
