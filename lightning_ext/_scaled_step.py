"""A factor on the learning rate of every parameter, in force only while the optimizer steps.

Splitting the parameter groups for good would change what schedulers see (`eta_min`, `min_lr` and
`OneCycleLR` distort the ratios) and what checkpoints hold. So the user's groups are swapped for
split copies while the optimizer works, and are whole again for every line of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ext._compat import rank_zero_warn

_Group = dict[str, Any]
# Set anew on every copy at every step, so never carried from one step to the next.
_RESCALED = ("params", "lr", "weight_decay")


def stepping_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer and those that it steps itself, as SAM, Lookahead, ZeRO or Muon+AdamW do.

    Args:
        optimizer: Any optimizer.

    Example:
        >>> inner = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> stepping_optimizers(inner) == [inner]
        True
    """
    found: list[Optimizer] = []
    waiting: list[Any] = [optimizer]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, Optimizer) and not any(value is other for other in found):
            found.append(value)
            for attribute in vars(value).values():
                if isinstance(attribute, (list, tuple)):
                    waiting += attribute
                elif isinstance(attribute, dict):
                    waiting += attribute.values()
                else:
                    waiting.append(attribute)
    # Where `param_groups` is a property, it shows the groups of an inner one.
    return [other for other in found if "param_groups" in vars(other)]


class ScaledStep:
    """Multiplies the rate of every parameter of one optimizer while it steps.

    Args:
        optimizer: A torch optimizer that owns its `param_groups`.
        factors: Factor on the learning rate, by parameter. Default for the rest: 1.
        no_weight_decay: Parameters that weight decay leaves alone. Default: none.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(()))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaled = ScaledStep(optimizer, {weight: 0.5})
        >>> weight.grad = torch.ones(())
        >>> optimizer.step()
        >>> round(weight.item(), 3), optimizer.param_groups[0]["lr"]
        (0.95, 0.1)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factors: Mapping[Tensor, float],
        no_weight_decay: Collection[Tensor] = (),
    ) -> None:
        self.optimizer = optimizer
        self._factors = dict(factors)
        self._no_weight_decay = frozenset(no_weight_decay)
        self._splits: dict[int, _Split] = {}
        self._user_groups: list[_Group] | None = None
        self._depth = 0
        before = optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        # First of all post hooks, so that the user's own find their groups whole. torch offers
        # `prepend=True` for the hooks of modules only.
        if (hooks := after.hooks_dict_ref()) is not None:
            hooks.move_to_end(after.id, last=False)
        self._handles = [before, after]

    def detach(self) -> None:
        """Put the user's groups back and leave the optimizer as it was."""
        self.restore()
        for handle in self._handles:
            handle.remove()

    def restore(self) -> None:
        """Put the user's groups back, also after a step that raised half-way."""
        self._depth = 0
        self._leave()

    def factors_of(self, group: _Group) -> list[float]:
        """Distinct factors within one of the user's groups."""
        return sorted({factor for factor, _ in self._split_of(group).parts})

    def group_state(self) -> list[list[_Group]]:
        """What an optimizer keeps per group and made different between the copies of one group.

        Returns:
            For every user group, the differing values of each of its copies.
        """
        return [self._split_of(group).differing() for group in self.optimizer.param_groups]

    def load_group_state(self, state: list[list[_Group]]) -> None:
        """Restore what `group_state` returned; groups that have changed since start afresh."""
        for group, copies in zip(self.optimizer.param_groups, state, strict=False):
            split = self._split_of(group)
            if len(split.copies) == len(copies):
                for copy, values in zip(split.copies, copies, strict=True):
                    copy.update(values)
            elif any(copies):
                rank_zero_warn(
                    "LayerwiseLRDecay: the layers were split into other groups when this "
                    f"checkpoint was saved, so {type(self.optimizer).__name__} starts "
                    f"{sorted(copies[0])} afresh from the values of the whole group"
                )

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._depth += 1
        # A subclass that calls `super().step()` runs the hooks twice, one pair inside the other.
        if self._depth == 1:
            args, kwargs = _replace_closure(args, kwargs, self._around)
            self._enter()
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self.restore()

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure, which is to see the user's groups however often it is called."""

        def run() -> Any:
            self._leave()
            try:
                result = closure()
            except BaseException:
                self._depth = 0  # torch runs no post hook after an exception
                raise
            self._enter()
            return result

        return run

    def _enter(self) -> None:
        self._user_groups = self.optimizer.param_groups
        splits = [self._split_of(group) for group in self._user_groups]
        self.optimizer.param_groups = [copy for s in splits for copy in s.rescaled()]
        self._splits = {id(split.user): split for split in splits}

    def _leave(self) -> None:
        if self._user_groups is None:
            return
        self.optimizer.param_groups, self._user_groups = self._user_groups, None
        for split in self._splits.values():
            split.write_back()

    def _split_of(self, group: _Group) -> _Split:
        split = self._splits.get(id(group))
        if split is None or not split.fits(group):
            split = self._splits[id(group)] = _Split(group, self._parts(group))
        return split

    def _parts(self, group: _Group) -> dict[tuple[float, bool], list[Tensor]]:
        parts: dict[tuple[float, bool], list[Tensor]] = {}
        for parameter in group["params"]:
            decays = parameter not in self._no_weight_decay
            parts.setdefault((self._factors.get(parameter, 1.0), decays), []).append(parameter)
        return parts


class _Split:
    """One of the user's groups, and its copies by (factor, decays)."""

    def __init__(self, user: _Group, parts: dict[tuple[float, bool], list[Tensor]]) -> None:
        self.user = user
        self.parts = list(parts)
        # A counter that is advanced in place must not be one and the same in all copies.
        self.copies = [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in items}
            | {"params": params}
            for params in parts.values()
            for items in [user.items()]
        ]
        self._params, self._count = user["params"], len(user["params"])
        self._seen = dict(user)

    def fits(self, group: _Group) -> bool:
        """Whether the group still holds the parameters that were split."""
        return (
            self.user is group
            and self._params is group["params"]
            and self._count == len(group["params"])
        )

    def rescaled(self) -> list[_Group]:
        """The copies, with what the user or a scheduler changed since the last step."""
        changed = {
            key: value
            for key, value in self.user.items()
            if key not in _RESCALED and value is not self._seen.get(key)
        }
        for (factor, decays), copy in zip(self.parts, self.copies, strict=True):
            copy.update(changed)
            copy["lr"] = self.user["lr"] * factor if factor != 1.0 else self.user["lr"]
            if "weight_decay" in self.user:
                copy["weight_decay"] = self.user["weight_decay"] if decays else 0.0
        self._seen = dict(self.user)
        return self.copies

    def write_back(self) -> None:
        """Give the user's group what the optimizer changed in its own bookkeeping."""
        for key, value in (self.copies[0] if self.copies else {}).items():
            if key not in _RESCALED and value is not self._seen.get(key):
                self.user[key] = value
        self._seen = dict(self.user)

    def differing(self) -> list[_Group]:
        """Values that are not the same in all copies."""
        keys = {key for copy in self.copies for key in self._own_keys(copy)}
        return [{key: copy[key] for key in keys if key in copy} for copy in self.copies]

    def _own_keys(self, copy: _Group) -> Iterator[str]:
        for key, value in copy.items():
            plain = key not in _RESCALED and isinstance(value, (bool, int, float, Tensor))
            if plain and not all(_same(value, other.get(key)) for other in self.copies):
                yield key


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)


def _replace_closure(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    around: Callable[[Callable[[], Any]], Callable[[], Any]],
) -> tuple[Any, Any]:
    # torch hands a pre hook the arguments of `step`, the optimizer itself among them.
    if len(args) > 1 and callable(args[1]):
        return (args[0], around(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": around(kwargs["closure"])}
    return args, kwargs
