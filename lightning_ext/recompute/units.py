"""Which parts of a model are run again as one: its blocks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from lightning_ext._torch import is_compiled, is_compiled_in_place

_LISTS = (nn.ModuleList, nn.ModuleDict)
# Of torch's own layers, those that call what they hold.
_OPEN = (
    nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip
# A part with a larger share of all layers is divided further where it can be.
_SEQUENCE, _ELEMENT = 1 / 4, 1 / 8
_MODEL = 1 / 2
_MOST = 64  # blocks, so that plans take a second at most


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model, by name; none inside another.

    Elements of its stacks (an `nn.Sequential` or `nn.ModuleList` of modules with layers of their
    own) and what stands beside them; without a stack, the children of the part that holds most of
    the model. Of sequences among these, their layers.

    Args:
        model: With its layers.
    """
    units = dict(_Search(model).inside("", model))
    pending = [name for name, unit in units.items() if isinstance(unit, nn.Sequential)]
    while pending:
        name = pending.pop(0)
        children = {f"{name}.{child}": layer for child, layer in units[name].named_children()}
        if len(units) + len(children) - 1 > _MOST or not children:
            continue
        # A run of its layers is as good as the whole, and there are more to choose from.
        units = {
            n: u for old, unit in units.items()
            for n, u in (children if old == name else {old: unit}).items()
        }  # fmt: skip
        pending += [n for n, layer in children.items() if isinstance(layer, nn.Sequential)]
    return units


def chosen(model: nn.Module, kinds: Sequence[type[nn.Module] | str]) -> dict[str, nn.Module]:
    """The modules of some classes, or with some names; none inside another.

    Args:
        model: With its layers.
        kinds: Classes, and names as in `named_modules`.
    """
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inside and (isinstance(module, classes) or name in kinds):
            found[name] = module
    return found


def missing(model: nn.Module, kinds: Iterable[type[nn.Module] | str]) -> Any:
    """The first class or name that a model has no module of; none if there is none.

    Args:
        model: With its layers.
        kinds: Classes, and names as in `named_modules`.
    """
    names, modules = zip(*model.named_modules(), strict=True)
    for kind in kinds:
        here = kind in names[1:] if isinstance(kind, str) else _has(modules[1:], kind)
        if not here:
            return kind
    return None


def without(units: Mapping[str, nn.Module], excluded: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Blocks that are not among some modules, in one of them or around one.

    Args:
        units: By name.
        excluded: Modules.
    """
    roots = set(excluded)
    inside = {m for root in roots for m in root.modules()}
    return {
        name: unit
        for name, unit in units.items()
        if unit not in inside and roots.isdisjoint(unit.modules())
    }


def layers_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers without layers of their own that a block calls, by name."""
    if not _calls_children(module):
        return
    for name, child in module.named_children():
        if isinstance(child, ScriptModule):  # takes no hooks
            continue
        if not _has_layers(child):
            yield name, child
        else:
            yield from ((f"{name}.{inner}", layer) for inner, layer in layers_in(child))


def free_units(model: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Those blocks of a model that are not part of compiled code or scripts.

    Args:
        model: That holds them.
        units: By name.
    """
    closed = [m for m in model.modules() if is_compiled(m) or is_compiled_in_place(m)]
    inside = {m for c in closed for m in c.modules() if m is not c or is_compiled_in_place(c)}
    return {
        name: unit
        for name, unit in units.items()
        if unit not in inside and not isinstance(unit, ScriptModule)
    }


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters of a module are divided over ranks and gathered by its hooks.

    Args:
        module: Any module.
    """
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


class _Search:
    def __init__(self, model: nn.Module) -> None:
        self.total = max(_size(model), 1)

    def inside(self, prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        element = _is_stack(module)
        for name, child in module.named_children():
            if self._divided(child, element):
                yield from self.inside(f"{prefix}{name}.", child)
            else:
                yield f"{prefix}{name}", child

    def _divided(self, module: nn.Module, element: bool) -> bool:
        if isinstance(module, _LISTS):
            return True
        if not _has_layers(module) or not _calls_children(module):
            return False
        share = _size(module) / self.total
        if _holds_stack(module):
            return not element or share > _ELEMENT
        if element:
            return False
        return share > (_SEQUENCE if isinstance(module, nn.Sequential) else _MODEL)


def _calls_children(module: nn.Module) -> bool:
    """An attention of torch, for one, uses the weights of its output layer and never calls it."""
    if is_compiled(module):  # what is inside is code by now
        return False
    return isinstance(module, (*_OPEN, *_LISTS)) or not type(module).__module__.startswith(
        "torch.nn."
    )


def _has(modules: Iterable[nn.Module], kind: type[nn.Module]) -> bool:
    return any(isinstance(module, kind) for module in modules)


def _has_layers(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_stack(module: nn.Module) -> bool:
    if not isinstance(module, (nn.Sequential, *_LISTS)):
        return False
    return sum(_has_layers(child) for child in module.children()) > 1


def _holds_stack(module: nn.Module) -> bool:
    return any(_is_stack(m) for m in module.modules())


def _size(module: nn.Module) -> int:
    return sum(not _has_layers(m) for m in module.modules())
