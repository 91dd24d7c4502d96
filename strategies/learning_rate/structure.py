"""What a rule sees of a network: a tree of layers with named parameters, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Role = Literal["layer", "norm", "embedding", "list"]

_NORM_NAME = re.compile(r"(^|_)(bn|ln)(\d*|_.*)$|norm(alization)?\d*($|_)")
_NORM_KIND = re.compile(r"norm(alization)?(act)?\d*d?$")
_EMBEDDING = re.compile(
    r"embed|^(wte|wpe|cls_token|class_token|dist_token|mask_token|reg_token|stem)$"
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A named parameter.

    Args:
        name: Full name, unique in the network.
        key: Identity of the tensor behind the name; two names with one key are one shared
            parameter. Default: the name itself.
        is_bias: Whether it is an additive bias. Default: False.
    """

    name: str
    key: Hashable = None
    is_bias: bool = False

    @property
    def identity(self) -> Hashable:
        """`key`, or the name where no key was given."""
        return self.name if self.key is None else self.key


# eq=False: hashing a whole tree by value on each look-up would cost more than the rule itself.
@dataclass(frozen=True, eq=False)
class Layer:
    """One node of a network: its own parameters, then its sub-layers in order.

    Args:
        name: Full name; `""` for the root.
        kind: Class of the layer; equal layers have equal kinds.
        role: `"norm"`, `"embedding"`, `"list"` (a container that applies its elements in order,
            such as `nn.Sequential`, `nn.ModuleList` or a functional Keras model), or `"layer"`
            for everything else. Default: `"layer"`.
        parameters: Parameters that belong to this layer itself. Default: none.
        children: Sub-layers, from the input to the output. Default: none.

    Example:
        >>> head = Layer("head", "Linear", parameters=(Parameter("head.weight"),))
        >>> Layer("", "Net", children=(head,)).weight_layers
        1
    """

    name: str
    kind: str
    role: Role = "layer"
    parameters: tuple[Parameter, ...] = ()
    children: tuple[Layer, ...] = ()

    @property
    def short_name(self) -> str:
        """Last part of the name."""
        return re.split(r"[./]", self.name)[-1]

    @cached_property
    def weight_layers(self) -> int:
        """How many layers at or below this one hold parameters and are not norms."""
        own = int(bool(self.parameters) and self.role != "norm")
        return own + sum(child.weight_layers for child in self.children)

    @cached_property
    def is_composite(self) -> bool:
        """Whether it is made of at least two layers with weights, as a residual block is."""
        return self.weight_layers >= 2

    def walk(self) -> Iterator[Layer]:
        """This layer and all below it, in order."""
        yield self
        for child in self.children:
            yield from child.walk()

    def all_parameters(self) -> Iterator[Parameter]:
        """Parameters of this layer and of all below it, in order."""
        for layer in self.walk():
            yield from layer.parameters


def looks_like_norm(name: str) -> bool:
    """Whether a layer's own name (`bn1`, `ln_f`, `input_layernorm`) says normalisation.

    Example:
        >>> looks_like_norm("post_attention_layernorm"), looks_like_norm("linear1")
        (True, False)
    """
    return bool(_NORM_NAME.search(name.lower()))


def is_norm_kind(kind: str) -> bool:
    """Whether a class name (`BatchNorm2d`, `RMSNormalization`) says normalisation.

    Example:
        >>> is_norm_kind("LlamaRMSNorm"), is_norm_kind("Conv2dNormActivation")
        (True, False)
    """
    return bool(_NORM_KIND.search(kind.lower()))


def looks_like_embedding(name: str) -> bool:
    """Whether the own name of a layer or parameter (`patch_embed`, `wte`) says embedding or stem.

    Example:
        >>> looks_like_embedding("pos_embed"), looks_like_embedding("conv1")
        (True, False)
    """
    return bool(_EMBEDDING.search(name))


def layers_from_names(names: Iterable[str]) -> Layer:
    """Build the tree from dotted (or slashed) parameter names alone.

    A level whose parts are all numbers is taken for a list of blocks; norms and embeddings are
    told by their names; two layers are equal when their parameters are called the same. Where
    the real modules are at hand, build `Layer`s from them instead: names cannot tell a norm that
    is called `1` in an `nn.Sequential`.

    Args:
        names: Parameter names from the input to the output, for example
            `[name for name, _ in module.named_parameters()]`.

    Raises:
        ValueError: A name is empty or comes twice.

    Example:
        >>> root = layers_from_names(["blocks.0.w", "blocks.1.w", "norm.weight"])
        >>> [(layer.name, layer.role) for layer in root.children]
        [('blocks', 'list'), ('norm', 'norm')]
    """
    split: list[tuple[tuple[str, ...], str]] = []
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"parameter names must be non-empty strings, got {name!r}")
        if name in seen:
            raise ValueError(f"parameter name {name!r} comes twice; names must be unique")
        seen.add(name)
        split.append((tuple(re.split(r"[./]", name)), name))
    return _grow("", split, depth=0)


def _grow(name: str, entries: list[tuple[tuple[str, ...], str]], depth: int) -> Layer:
    own = tuple(
        Parameter(full, is_bias=parts[-1].endswith("bias"))
        for parts, full in entries
        if len(parts) == depth + 1
    )
    below: dict[str, list[tuple[tuple[str, ...], str]]] = {}
    for parts, full in entries:
        if len(parts) > depth + 1:
            below.setdefault(parts[depth], []).append((parts, full))
    children = tuple(
        _grow(_prefix(group[0][1], group[0][0], depth + 1), group, depth + 1)
        for group in below.values()
    )
    short = entries[0][0][depth - 1] if depth else ""
    role: Role = "layer"
    if children and not own and all(part.isdecimal() for part in below):
        role = "list"
    elif not children and looks_like_norm(short):
        role = "norm"
    kind = ",".join(sorted(".".join(parts[depth:]) for parts, _ in entries))
    return Layer(name, kind, role, own, children)


def _prefix(full: str, parts: tuple[str, ...], depth: int) -> str:
    """The first `depth` parts of a name, with the separators it was written with."""
    return full[: sum(len(part) + 1 for part in parts[:depth]) - 1]
