"""What a rule sees of a network: a tree of layers with named parameters, and nothing else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Role = Literal["layer", "norm", "embedding", "list"]

_NORM_NAME = re.compile(r"(^|_)(bn|ln)(\d*|_.*)$|norm(alization)?\d*($|_)|^p_?re_?lu")
_NORM_KIND = re.compile(r"norm(alization)?(act)?\d*d?$|^p_?relu$")
_EMBEDDING = re.compile(
    r"embed|(^|_)embs?($|_)|^pos(ition(s|al)?)?($|_)"
    r"|^(wte|wpe|(cls|class|dist|mask|reg|register)_tokens?|stem)$"
)
# Classifiers by any name, and BEiT's bias shared by all blocks, which the last one uses too.
_HEAD = re.compile(
    r"^((?!multi|pre_)(\w+_)?(heads?|classifier|logits)|head_\w+|fc|cls|score|qa_outputs"
    r"|predictions|output_layer|aux(\d|_|logits)\w*|rel(ative)?_pos(ition)?_bias)$",
    re.IGNORECASE,
)
# What stands side by side, and what is added to a layer from outside, make no layers of their own.
_BESIDE = re.compile(r"^(experts|branches|heads)$")
_ADDED = re.compile(r"^(parametrizations$|lora_)")


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
        role: `"norm"` (or anything else without a depth of its own, such as a learned
            activation), `"embedding"`, `"list"` (a container that applies its elements in order,
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

    @cached_property
    def short_name(self) -> str:
        """Last part of the name."""
        return last_part(self.name)

    @cached_property
    def weight_layers(self) -> int:
        """How many layers at or below this one hold parameters and are not norms."""
        own = int(bool(self.parameters) and self.role != "norm")
        total = own + sum(child.weight_layers for child in self.children)
        one = _BESIDE.match(self.short_name) or any(
            _ADDED.match(child.short_name) for child in self.children
        )
        return min(total, 1) if one else total

    @cached_property
    def has_parameters(self) -> bool:
        """Whether there is a parameter at or below this layer."""
        return bool(self.parameters) or any(child.has_parameters for child in self.children)

    @property
    def unwrapped(self) -> Layer:
        """The first layer on the way down that does more than wrap another."""
        layer = self
        while not layer.parameters:
            inner = [child for child in layer.children if child.has_parameters]
            if len(inner) != 1:
                break
            layer = inner[0]
        return layer

    @cached_property
    def is_composite(self) -> bool:
        """Whether it is made of at least two layers with weights, as a residual block is."""
        return self.weight_layers >= 2

    @cached_property
    def holds_blocks(self) -> bool:
        """Whether it, or anything below it, is a list of blocks."""
        return bool(self.blocks()) or any(
            child.holds_blocks for child in self.children if child.is_composite
        )

    @cached_property
    def is_stage(self) -> bool:
        """Whether it is made of lists of blocks for the most part.

        An element of a list of blocks that is a stage, as in Swin or EfficientNet, is no block:
        its own elements are.
        """
        if self.role == "list" and self.blocks(in_stage=True):
            return True
        composite = [child for child in self.children if child.is_composite]
        lists = [c for c in composite if c.role == "list" and c.blocks(in_stage=True)]
        if not any(child.blocks() for child in lists) and len(lists) < len(composite):
            return False  # attention and MLP, each in a list, are one block
        return 2 * sum(child.weight_layers for child in lists) > self.weight_layers

    def blocks(self, in_stage: bool = False) -> tuple[Layer, ...]:
        """The children that are blocks and follow one another; none if it is no list of blocks.

        Args:
            in_stage: Whether it is inside a stage, which may hold a single block. Default: False.
        """
        weighted = [child for child in self.children if child.weight_layers]
        composite = tuple(child for child in weighted if child.is_composite)
        # A squeeze-excitation among three convolutions does not make the list one of blocks.
        if not composite or 2 * len(composite) < len(weighted):
            return ()
        if self.role == "list":
            # A list of one block starts with it; what follows a pooling layer is no such list.
            starts = weighted[0].short_name == "0" or not weighted[0].short_name.isdecimal()
            lone = len(weighted) == 1 and starts and not weighted[0].holds_blocks
            # Different kinds in one list (self-attention, cross-attention, MLP) make up one block.
            found = _most_alike(composite) >= 2 or (len(composite) == 1 and (in_stage or lone))
            return composite if found else ()
        # Blocks held as attributes (block1, block2); two whole networks side by side are not.
        plain = tuple(child for child in composite if child.role != "list")
        found = _most_alike(plain) >= 2 and not any(child.holds_blocks for child in composite)
        return plain if found else ()

    def walk(self) -> Iterator[Layer]:
        """This layer and all below it, in order."""
        pending = [self]
        while pending:
            layer = pending.pop()
            yield layer
            pending.extend(reversed(layer.children))

    def all_parameters(self) -> Iterator[Parameter]:
        """Parameters of this layer and of all below it, in order."""
        for layer in self.walk():
            yield from layer.parameters

    def without(self, dropped: Collection[Layer]) -> Layer:
        """This layer without some of the layers below it."""
        children = tuple(c.without(dropped) for c in self.children if c not in dropped)
        return self if children == self.children else replace(self, children=children)


def _most_alike(layers: Collection[Layer]) -> int:
    return max(Counter(map(_full_kind, layers)).values(), default=0)


def _full_kind(layer: Layer) -> tuple[str, ...]:
    """Kind of a layer and of what it wraps: `PreNorm(Attention)` is not `PreNorm(MLP)`."""
    kinds = [layer.kind]
    while not layer.parameters:
        inner = [child for child in layer.children if child.weight_layers]
        if len(inner) != 1 or inner[0].role == "list":
            break
        layer = inner[0]
        # `_orig_mod` or `_checkpoint_wrapped_module` around some blocks makes them no other kind.
        kinds = [layer.kind] if layer.short_name.startswith("_") else [*kinds, layer.kind]
    return tuple(kinds)


def last_part(name: str) -> str:
    """Last part of a dotted or slashed name.

    Example:
        >>> last_part("encoder.layer.0.attention"), last_part("dense/kernel")
        ('attention', 'kernel')
    """
    return re.split(r"[./]", name)[-1]


def looks_like_norm(name: str) -> bool:
    """Whether a layer's own name (`bn1`, `ln_f`, `input_layernorm`) says normalisation.

    Example:
        >>> looks_like_norm("post_attention_layernorm"), looks_like_norm("linear1")
        (True, False)
    """
    return bool(_NORM_NAME.search(name.lower()))


def is_norm_kind(kind: str) -> bool:
    """Whether a class (`BatchNorm2d`, `RMSNormalization`, `PReLU`) has no depth of its own.

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
    return bool(_EMBEDDING.search(name.lower()))


def looks_like_head(name: str) -> bool:
    """Whether a layer's own name (`classifier`, `lm_head`, `fc`) says that it ends the network.

    Example:
        >>> looks_like_head("lm_head"), looks_like_head("multi_head")
        (True, False)
    """
    return bool(_HEAD.match(name))
