"""The tree of layers that `strategies` reasons about, read from a torch module."""

from __future__ import annotations

from torch import nn

from strategies.learning_rate import Layer, Parameter
from strategies.learning_rate.structure import Role, is_norm_kind

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def layers_from_module(module: nn.Module) -> Layer:
    """Read the tree of a module, every use of a shared layer or parameter included.

    Args:
        module: Any torch module, a LightningModule among them.

    Example:
        >>> layers_from_module(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))).children[1].role
        'norm'
    """
    return _grow("", module)


def _grow(path: str, module: nn.Module) -> Layer:
    prefix = f"{path}." if path else ""
    parameters = tuple(
        Parameter(f"{prefix}{name}", key=id(parameter), is_bias=is_bias(path, name))
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    # `named_children` skips the second use of a shared layer; `named_modules` can be told not to.
    children = tuple(
        _grow(f"{prefix}{name}", child)
        for name, child in module.named_modules(remove_duplicate=False)
        if name and "." not in name
    )
    return Layer(path, type(module).__name__, _role(path, module), parameters, children)


def is_bias(path: str, name: str) -> bool:
    """Whether a parameter is a bias: `bias`, an LSTM's `bias_ih_l0`, a parametrized `bias`."""
    return "bias" in name.split("_") or path.endswith(".parametrizations.bias")


def _role(path: str, module: nn.Module) -> Role:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, _LISTS):
        return "list"
    if is_norm_kind(type(module).__name__) and not any(map(_has_parameters, module.children())):
        return "norm"
    return "layer"


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
