"""The part of a model that is cut into stages, as a list of what runs after what."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Inputs:
    """What `forward` of the pipelined module is called with.

    Args:
        args: Positional arguments. Default: none.
        kwargs: Others. Default: none.
        by_name: All of them, with defaults. Default: none.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    by_name: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PipelinePart:
    """One of the ordered parts of a model, for models that are no `nn.Sequential`.

    A model lists them in a method `pipeline_parts()`, in the order in which `forward` runs them.
    Each gets what the one before returned (a tuple as several arguments), the first what `forward`
    gets. A plain `nn.Module` in the list is a part, too.

    Args:
        run: Module or function.
        modules: Modules and parameters that `run` uses, if it is a function. Default: none.
        takes: Names of arguments of `forward` that it needs besides (masks, positions), as
            keywords. For the first part: the only ones that it gets; without them it gets all that
            `forward` gets, in the same way. Default: none.

    Raises:
        TypeError: `modules` is no sequence of modules and parameters, or `takes` none of names.

    Example:
        >>> embed, block, head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        >>> parts = [
        ...     PipelinePart(lambda tokens: embed(tokens) * 2, modules=(embed,)), block, head
        ... ]
    """

    run: Callable[..., Any]
    modules: Sequence[nn.Module | nn.Parameter] = ()
    takes: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check_each("modules", self.modules, (nn.Module, nn.Parameter), "modules=(embed, norm)")
        _check_each("takes", self.takes, str, 'takes=("mask",)')

    def __call__(self, state: tuple[Any, ...], inputs: Inputs, first: bool) -> Any:
        """Run on what the part before returned and on the arguments of `forward`."""
        asked = {name: inputs.by_name[name] for name in self.takes}
        if not first:
            return self.run(*state, **asked)
        if not self.takes:
            return self.run(*inputs.args, **inputs.kwargs)
        run = self.run.forward if isinstance(self.run, nn.Module) else self.run
        if _accepts(run, self.takes):
            return self.run(**asked)
        return self.run(*asked.values())

    @property
    def owned(self) -> tuple[nn.Module | nn.Parameter, ...]:
        """Modules and parameters that belong to it."""
        return (self.run,) if isinstance(self.run, nn.Module) else tuple(self.modules)


class _Link(PipelinePart):
    """One of an `nn.Sequential`, which hands on whatever comes out as one argument."""

    def __call__(self, state: tuple[Any, ...], inputs: Inputs, first: bool) -> Any:
        given = tuple(inputs.by_name.values()) if first else state
        return self.run(given[0] if len(given) == 1 else given)


@dataclass(frozen=True)
class Pipeline:
    """A module and its ordered parts.

    Args:
        module: Whose call is replaced by the stages.
        name: Its path in the LightningModule; `""` is the LightningModule itself.
        parts: In order.
        names: Of the parts, for messages.
    """

    module: nn.Module
    name: str
    parts: tuple[PipelinePart, ...]
    names: tuple[str, ...]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        """The arguments of a call."""
        bound = inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs)
        bound.apply_defaults()
        return Inputs(args, kwargs, dict(list(bound.arguments.items())[1:]))


def named(run: Callable[..., Any]) -> str:
    """What a part runs, in words."""
    return str(getattr(run, "__name__", type(run).__name__))


def find_pipeline(root: nn.Module, name: str | None, stages: int) -> Pipeline:
    """The part of a model that is to be cut into stages.

    Args:
        root: The LightningModule.
        name: Path of the module, or None to look for it.
        stages: Into how many stages.

    Raises:
        ValueError: There is none or there are several, or it cannot be cut.
    """
    modules = dict(root.named_modules())
    if name is not None:
        if name not in modules:
            raise ValueError(
                f"pipeline_module={name!r} is no module of the model; there are "
                f"{', '.join(n for n in list(modules)[1:9])}"
            )
        return _pipeline(modules[name], name)
    if hasattr(root, "pipeline_parts"):
        return _pipeline(root, "")
    found = [n for n, child in root.named_children() if _can_be_cut(child, stages)]
    if len(found) != 1:
        raise ValueError(
            f"pipeline={stages}: the model has {len(found)} modules that can be cut into stages"
            f"{' (' + ', '.join(found) + ')' if found else ''}; name one with pipeline_module=. "
            "It can be an nn.Sequential, or have a method pipeline_parts() that lists its parts"
        )
    return _pipeline(modules[found[0]], found[0])


def _can_be_cut(module: nn.Module, stages: int) -> bool:
    plain = type(module).forward is nn.Sequential.forward
    return hasattr(module, "pipeline_parts") or (
        isinstance(module, nn.Sequential) and plain and len(module) >= stages
    )


def _pipeline(module: nn.Module, name: str) -> Pipeline:
    parts: list[Any]
    if hasattr(module, "pipeline_parts"):
        listed: Callable[[], Sequence[Any]] = module.pipeline_parts  # type: ignore[assignment]
        parts = list(listed())
    elif isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        parts = [_Link(part) for part in module]
    else:
        raise ValueError(
            f"pipeline_module={name!r} is a {type(module).__name__}, which is no nn.Sequential and "
            "has no method pipeline_parts(); add one that lists its parts in order"
        )
    wrapped = tuple(p if isinstance(p, PipelinePart) else PipelinePart(p) for p in parts)
    paths = {id(m): n for n, m in module.named_modules()}
    names = tuple(paths.get(id(p.run)) or named(p.run) for p in wrapped)
    _check_complete(module, name, wrapped)
    _check_taken(module, name, wrapped)
    return Pipeline(module, name, wrapped, names)


def _check_complete(module: nn.Module, name: str, parts: Sequence[PipelinePart]) -> None:
    owned = {id(p) for part in parts for p in parameters_of(part)}
    if hasattr(module, "trainer"):
        return  # the rest of a LightningModule is used around the call
    for path, parameter in module.named_parameters():
        if id(parameter) not in owned:
            raise ValueError(
                f"the parts of {name!r} do not use its parameter {path!r}; add its module to "
                "PipelinePart(..., modules=...)"
            )


def _check_taken(module: nn.Module, name: str, parts: Sequence[PipelinePart]) -> None:
    known = list(inspect.signature(type(module).forward).parameters)[1:]
    for part in parts:
        for taken in part.takes:
            if taken not in known:
                raise ValueError(
                    f"takes={tuple(part.takes)!r}: forward of {name or 'the module'!r} has no "
                    f"argument {taken!r}; it has {', '.join(known)}"
                )


def _check_each(argument: str, value: Any, kind: Any, example: str) -> None:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not listed or not all(isinstance(x, kind) for x in value):
        raise TypeError(f"{argument}={value!r} of a PipelinePart: pass a tuple, as {example}")


def _accepts(run: Callable[..., Any], names: Sequence[str]) -> bool:
    parameters = inspect.signature(run).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return any_name or all(name in parameters for name in names)


def parameters_of(part: PipelinePart) -> Iterator[nn.Parameter]:
    """Parameters of a part."""
    for owner in part.owned:
        if isinstance(owner, nn.Parameter):
            yield owner
        else:
            yield from owner.parameters()
