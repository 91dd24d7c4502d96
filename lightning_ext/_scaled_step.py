"""A factor on the learning rate of every parameter, in force only while the optimizer steps.

Splitting the parameter groups for good would change what schedulers see (`eta_min`, `min_lr` and
`OneCycleLR` distort the ratios) and what checkpoints hold. So the user's groups are swapped for
split copies after the closure has run and put back when the step is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_Group = dict[str, Any]
# Set on every copy at every step, so never carried from one step to the next.
_RESCALED = ("params", "lr", "weight_decay")


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that does the step: wrappers such as ZeRO, SAM or Lookahead hold another.

    Args:
        optimizer: Any optimizer.
    """
    seen = [optimizer]
    while inner := [v for v in vars(seen[-1]).values() if isinstance(v, Optimizer)]:
        if any(inner[0] is optimizer for optimizer in seen):
            break
        seen.append(inner[0])
    return seen[-1]


class ScaledStep:
    """Multiplies the rate of every parameter of one optimizer while it steps.

    Args:
        optimizer: A torch optimizer with `param_groups`.
        factors: Factor on the learning rate, by parameter. Default for the rest: 1.
        no_weight_decay: Parameters that weight decay leaves alone. Default: none.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factors: Mapping[Tensor, float],
        no_weight_decay: Collection[Tensor] = (),
    ) -> None:
        self.optimizer = innermost(optimizer)
        self._factors = dict(factors)
        self._no_weight_decay = frozenset(no_weight_decay)
        self._splits: dict[int, _Split] = {}
        self._user_groups: list[_Group] | None = None
        self._depth = 0
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]

    def detach(self) -> None:
        """Put the user's groups back and leave the optimizer as it was."""
        self.restore()
        for handle in self._handles:
            handle.remove()

    def restore(self) -> None:
        """Put the user's groups back, also after a step that raised half-way."""
        self._depth = 0
        if self._user_groups is None:
            return
        self.optimizer.param_groups, self._user_groups = self._user_groups, None
        for split in self._splits.values():
            split.write_back()

    def group_state(self) -> list[list[_Group]]:
        """What an optimizer keeps per group and made different between the copies of one group.

        Returns:
            For every user group, the differing plain values of each of its copies.
        """
        return [self._split_of(group).differing() for group in self.optimizer.param_groups]

    def load_group_state(self, state: list[list[_Group]]) -> None:
        """Restore what `group_state` returned; groups that have changed since start afresh."""
        for group, copies in zip(self.optimizer.param_groups, state, strict=False):
            split = self._split_of(group)
            if len(split.copies) == len(copies):
                for copy, values in zip(split.copies, copies, strict=True):
                    copy.update(values)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._depth += 1
        # A subclass that calls `super().step()` runs the hooks twice, one pair inside the other.
        if self._depth > 1:
            return args, kwargs
        args, kwargs = _with_closure_run(args, kwargs)
        self._user_groups = self.optimizer.param_groups
        splits = [self._split_of(group) for group in self._user_groups]
        self.optimizer.param_groups = [copy for s in splits for copy in s.rescaled()]
        self._splits = {id(split.user): split for split in splits}
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self.restore()

    def _split_of(self, group: _Group) -> _Split:
        split = self._splits.get(id(group))
        if split is not None and split.fits(group):
            return split
        parts: dict[tuple[float, bool], list[Tensor]] = {}
        for parameter in group["params"]:
            decays = parameter not in self._no_weight_decay
            parts.setdefault((self._factors.get(parameter, 1.0), decays), []).append(parameter)
        split = _Split(group, list(parts), [{**group, "params": p} for p in parts.values()])
        self._splits[id(group)] = split
        return split


@dataclass
class _Split:
    """One of the user's groups, and its copies by (factor, decays)."""

    user: _Group
    parts: list[tuple[float, bool]]
    copies: list[_Group]
    params: list[Tensor] = field(init=False)
    count: int = field(init=False)
    seen: _Group = field(init=False)

    def __post_init__(self) -> None:
        self.params, self.count = self.user["params"], len(self.user["params"])
        self.seen = dict(self.user)

    def fits(self, group: _Group) -> bool:
        """Whether the group still holds the parameters that were split."""
        return (
            self.user is group
            and self.params is group["params"]
            and self.count == len(group["params"])
        )

    def rescaled(self) -> list[_Group]:
        """The copies, with what the user or a scheduler changed since the last step."""
        changed = {
            key: value
            for key, value in self.user.items()
            if key not in _RESCALED and value is not self.seen.get(key)
        }
        for (factor, decays), copy in zip(self.parts, self.copies, strict=True):
            copy.update(changed)
            copy["lr"] = self.user["lr"] * factor if factor != 1.0 else self.user["lr"]
            if "weight_decay" in self.user:
                copy["weight_decay"] = self.user["weight_decay"] if decays else 0.0
        self.seen = dict(self.user)
        return self.copies

    def write_back(self) -> None:
        """Give the user's group what the optimizer changed in its own bookkeeping."""
        for key, value in (self.copies[0] if self.copies else {}).items():
            if key not in _RESCALED and value is not self.seen.get(key):
                self.user[key] = value
        self.seen = dict(self.user)

    def differing(self) -> list[_Group]:
        """Plain values that are not the same in all copies."""
        keys = {
            key
            for copy in self.copies
            for key, value in copy.items()
            if key not in _RESCALED and isinstance(value, (bool, int, float))
            if any(other.get(key) != value for other in self.copies)
        }
        return [{key: copy[key] for key in keys if key in copy} for copy in self.copies]


def _with_closure_run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Run the closure now, under the user's own groups, and pass its result on."""
    # torch hands a pre hook the arguments of `step`, the optimizer itself among them.
    if len(args) > 1 and callable(args[1]):
        return (args[0], _Remembered(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _Remembered(kwargs["closure"])}
    return args, kwargs


class _Remembered:
    """A closure that has been called once already; an optimizer may evaluate it again."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        self._closure = closure
        with torch.enable_grad():
            self._results = [closure()]

    def __call__(self) -> Any:
        return self._results.pop() if self._results else self._closure()
