"""A factor on the learning rate of every parameter, in force only while the optimizer steps.

Splitting the parameter groups for good would change what schedulers see (`eta_min`, `min_lr` and
`OneCycleLR` distort the ratios) and what checkpoints hold. So the user's groups are swapped for
split copies while the optimizer works, and are whole again for every line of the user's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ext._compat import rank_zero_warn

_Group = dict[str, Any]
# Set anew on every copy at every step, so never carried from one step to the next.
_RESCALED = ("params", "lr", "weight_decay")
_ZERO = "ZeroRedundancyOptimizer"
# Held weakly on both sides; an optimizer's own hooks keep its ScaledStep alive.
_IN_FORCE: WeakKeyDictionary[Optimizer, ref[ScaledStep]] = WeakKeyDictionary()


def _can_be_hooked(optimizer: Optimizer) -> bool:
    try:
        optimizer.register_step_post_hook(lambda *_: None).remove()
    except AttributeError:  # a wrapper that calls no `super().__init__`
        return False
    return True


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
    owners = [other for other in found if "param_groups" in vars(other)]
    # ZeRO copies its groups to those of its inner optimizer, which must be as many.
    return [o for o in owners if _can_be_hooked(o) and type(o).__name__ != _ZERO]


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
        self._paused = False
        # Whether each copy's parameters were asked for, in the first step that asked for any.
        self.asked: list[bool] | None = None
        before = optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        # First of all post hooks, so that the user's own find their groups whole. torch offers
        # `prepend=True` for the hooks of modules only.
        if (hooks := after.hooks_dict_ref()) is not None:
            hooks.move_to_end(after.id, last=False)
        self._before_hook = before
        self._handles = [
            before,
            after,
            # A signal handler may save while the optimizer is at work.
            optimizer.register_state_dict_pre_hook(lambda _: self._pause()),
            optimizer.register_state_dict_post_hook(lambda *_: self._go_on()),
        ]
        known = _IN_FORCE.get(optimizer)
        if known is not None and (earlier := known()) is not None:
            earlier.detach()  # of a fit that ended without a hook
        _IN_FORCE[optimizer] = ref(self)

    def detach(self) -> None:
        """Put the user's groups back and leave the optimizer as it was."""
        self.restore()
        for handle in self._handles:
            handle.remove()
        _IN_FORCE.pop(self.optimizer, None)

    def go_last(self) -> None:
        """Act after all pre hooks, so that the user's own find their groups whole."""
        hooks = self._before_hook.hooks_dict_ref()
        if hooks is not None and next(reversed(hooks)) != self._before_hook.id:
            hooks.move_to_end(self._before_hook.id)

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
        groups = self._user_groups if self._user_groups is not None else self.optimizer.param_groups
        return [self._split_of(group).differing() for group in groups]

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
            if self.asked is None:
                asked = [asked for s in self._splits.values() for asked in s.watched()]
                self.asked = asked if any(asked) else None

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

    @property
    def passed_over(self) -> bool:
        """Whether the optimizer went through as many copies as the user has groups, and no more.

        So does one that keeps a list beside its groups, such as AdaBound.
        """
        asked, groups = self.asked or [], len(self.optimizer.param_groups)
        return len(asked) > groups and asked == [i < groups for i in range(len(asked))]

    def _pause(self) -> None:
        self._paused = self._user_groups is not None
        self._leave()

    def _go_on(self) -> None:
        if self._paused:
            self._paused = False
            self._enter()

    def _enter(self) -> None:
        if self._user_groups is not None:
            return
        self._user_groups = self.optimizer.param_groups
        splits = [self._split_of(group) for group in self._user_groups]
        if self.asked is None:
            if torch.compiler.is_compiling():  # for which a group has to be a plain dict
                self.asked = []
            else:
                for split in splits:
                    split.watch()
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


class _Watched(_Group):
    """A group that knows whether its parameters were asked for."""

    asked = False

    def __getitem__(self, key: str) -> Any:
        self.asked = self.asked or key == "params"
        return super().__getitem__(key)


class _Split:
    """One of the user's groups, and its copies by (factor, decays)."""

    def __init__(self, user: _Group, parts: dict[tuple[float, bool], list[Tensor]]) -> None:
        self.user = user
        self.parts = list(parts)
        # A counter that is advanced in place must not be one and the same in all copies.
        self.copies: list[_Group] = [
            _copied(user) | {"params": params} for params in parts.values()
        ]
        self._params = list(user["params"])
        self._remember()

    def fits(self, group: _Group) -> bool:
        """Whether the group still holds the parameters that were split."""
        now, then = group["params"], self._params
        return self.user is group and len(now) == len(then) and all(map(operator.is_, now, then))

    def rescaled(self) -> list[_Group]:
        """The copies, with what the user or a scheduler changed since the last step."""
        changed = {
            key: value
            for key, value in self.user.items()
            if key not in _RESCALED and not _unchanged(value, self._seen.get(key))
        }
        for (factor, decays), copy in zip(self.parts, self.copies, strict=True):
            copy.update(_copied(changed))
            copy["lr"] = self.user["lr"] * factor if factor != 1.0 else self.user["lr"]
            if "weight_decay" in self.user:
                copy["weight_decay"] = self.user["weight_decay"] if decays else 0.0
        self._remember()
        return self.copies

    def write_back(self) -> None:
        """Give the user's group what the optimizer changed in its own bookkeeping."""
        for key, value in (self.copies[0] if self.copies else {}).items():
            if key in _RESCALED or _unchanged(value, self._seen.get(key)):
                continue
            mine = self.user.get(key)
            if isinstance(mine, Tensor) and isinstance(value, Tensor) and _alike(mine, value):
                mine.copy_(value)  # the user may hold on to it
            else:
                self.user[key] = value
        self._remember()

    def _remember(self) -> None:
        # A tensor may change in place, hence a copy of its value.
        self._seen = _copied({k: v for k, v in self.user.items() if k not in _RESCALED})

    def watch(self) -> None:
        """Have the copies note who asks for their parameters."""
        if not any(isinstance(copy, _Watched) for copy in self.copies):
            self.copies = [_Watched(copy) for copy in self.copies]

    def watched(self) -> list[bool]:
        """Whether each copy was asked for its parameters; ends the watch."""
        asked = [copy.asked for copy in self.copies if isinstance(copy, _Watched)]
        self.copies = [dict(copy) for copy in self.copies]
        return asked

    def differing(self) -> list[_Group]:
        """Values that are not the same in all copies."""
        first = self.copies[0] if self.copies else {}
        keys = {key for copy in self.copies for key in self._own_keys(copy, first)}
        return [{key: copy[key] for key in keys if key in copy} for copy in self.copies]

    def _own_keys(self, copy: _Group, first: _Group) -> Iterator[str]:
        for key in copy.keys() | first.keys():
            value, other = copy.get(key), first.get(key)
            plain = any(isinstance(v, (bool, int, float, Tensor)) for v in (value, other))
            if key not in _RESCALED and plain and not _same(value, other):
                yield key


def _copied(group: _Group) -> _Group:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _unchanged(value: Any, seen: Any) -> bool:
    return _same(value, seen) if isinstance(value, Tensor) else value is seen


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and _alike(a, b) and torch.equal(a, b)
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
