"""Which part of a module counts for an optimizer: all of it seldom does."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from strategies.learning_rate.structure import Layer, looks_like_head

_COPY = re.compile(r"(^|_)(teacher|target|momentum|ema|reference)(_|\d|$)", re.IGNORECASE)


def without_frozen_tail(network: Layer, trained: Collection[str]) -> tuple[Layer, list[str]]:
    """Drop the frozen networks that stand beside the trained one.

    A teacher or a perceptual loss sits in the same module but not behind the trained network:
    counted as deeper, it would push all rates down. What goes are the last children, from the end
    backwards, as long as they are made of several layers and hold nothing trained; and wherever
    it stands, a frozen child called teacher, target, momentum, ema or reference. A frozen head
    stays, and with it all that comes before; so does what is called backbone, and whatever a
    trained head may stand on. So freezing a part of one network shifts no other.

    Args:
        network: The root of the tree; mere wrappers around the module are looked through.
        trained: Names of the parameters that are trained.

    Returns:
        The rest of the tree, and the names of what was dropped.

    Example:
        >>> from strategies.learning_rate import layers_from_names
        >>> network = layers_from_names(["student.a.w", "student.b.w", "vgg.a.w", "vgg.b.w"])
        >>> without_frozen_tail(network, trained={"student.a.w", "student.b.w"})[1]
        ['vgg']
    """
    module = network.unwrapped
    names = frozenset(trained)
    at_work = [child for child in module.children if _holds_any(child, names)]
    # The elements of a list are applied one after the other: none stands beside the rest.
    if module.role == "list" or not at_work:
        return network, []
    dropped: list[Layer] = []
    at_end = not all(looks_like_head(child.short_name) for child in at_work)
    for child in reversed(module.children):
        stays = looks_like_head(child.short_name) or child.short_name == "backbone"
        may_go = _COPY.search(child.short_name) or (at_end and not stays)
        if may_go and child.is_composite and child not in at_work:
            dropped.insert(0, child)
        elif child.has_parameters:
            at_end = False
    return network.without(dropped), [child.name for child in dropped]


def networks_of(network: Layer, optimizers: Sequence[Collection[str]]) -> list[Layer]:
    """The part of a module whose depths count for each of its optimizers.

    Optimizers over separate networks (a GAN) count the depths of their own. Optimizers that share
    one (Muon for the matrices, AdamW for the rest; one for the body, one for the head) count the
    whole.

    Args:
        network: The root of the tree.
        optimizers: Names of the parameters that each optimizer holds, at least one each.

    Returns:
        One part for each optimizer.

    Raises:
        ValueError: An optimizer has no names, or the network has no parameter of such a name.

    Example:
        >>> from strategies.learning_rate import layers_from_names
        >>> gan = layers_from_names(["generator.a.w", "generator.b.w", "critic.a.w", "critic.b.w"])
        >>> generator, critic = ["generator.a.w", "generator.b.w"], ["critic.a.w", "critic.b.w"]
        >>> [part.name for part in networks_of(gan, [generator, critic])]
        ['generator', 'critic']
    """
    held = frozenset().union(*optimizers)
    parts = [smallest_holding(network, names, held) for names in optimizers]
    inside = [_names(part) for part in parts]
    separate = sum(map(len, inside)) == len(frozenset().union(*inside))
    if not separate or any(looks_like_head(part.short_name) for part in parts):
        return [network] * len(parts)
    return parts


def smallest_holding(
    network: Layer, names: Collection[str], held: Collection[str] | None = None
) -> Layer:
    """The smallest part of a network that holds all the given parameters.

    Networks before the first or behind the last of the parameters are no part of it, as the
    critics are none of CycleGAN's two generators; single layers and heads there are. A single
    layer beside them that no optimizer holds (`held` says so) belongs to their network too.

    Args:
        network: The root of the tree.
        names: Names of parameters, at least one.
        held: Names of all parameters that any optimizer holds. Default: None, all of the network.

    Raises:
        ValueError: There are no names, or the network has no parameter of such a name.

    Example:
        >>> from strategies.learning_rate import layers_from_names
        >>> gan = layers_from_names(["generator.a.w", "generator.b.w", "critic.a.w"])
        >>> smallest_holding(gan, ["generator.a.w", "generator.b.w"]).name
        'generator'
    """
    wanted = frozenset(names)
    if not wanted:
        raise ValueError("names is empty; pass the name of at least one parameter")
    if unknown := wanted - _names(network):
        some = [parameter.name for parameter in network.all_parameters()][:2]
        raise ValueError(
            f"names holds {min(unknown)!r}, which is no parameter of the network; pass full names, "
            f"as in {some}"
        )
    part = network
    trained = _names(network) if held is None else frozenset(held)
    while inner := [child for child in part.children if wanted <= _names(child)]:
        beside = [child for child in part.children if child not in inner and child.has_parameters]
        if any(not child.is_composite and not _holds_any(child, trained) for child in beside):
            break
        part = inner[0]
    return part if part.role == "list" else part.without(_at_the_ends(part, wanted))


def _at_the_ends(part: Layer, wanted: frozenset[str]) -> list[Layer]:
    at_work = [i for i, child in enumerate(part.children) if _holds_any(child, wanted)]
    if not at_work:
        return []
    outside = part.children[: at_work[0]] + part.children[at_work[-1] + 1 :]
    networks = [c for c in outside if c.is_composite and not looks_like_head(c.short_name)]
    return networks if all(c in networks for c in outside if c.has_parameters) else []


def _names(layer: Layer) -> frozenset[str]:
    return frozenset(parameter.name for parameter in layer.all_parameters())


def _holds_any(layer: Layer, names: Collection[str]) -> bool:
    return any(parameter.name in names for parameter in layer.all_parameters())
