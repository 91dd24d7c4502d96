"""Ways for a block to save less: layers whose outputs are made again from their inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ext.recompute.leaves import Chosen
from lightning_ext.recompute.measure import Layer, Seen

_CHEAP = 0.02  # share of a block's cost; layers below are dropped first and together
_WAYS = 4


@dataclass(frozen=True)
class Dropped:
    """Layers whose outputs are not kept.

    Args:
        chosen: Their calls.
        makers: Layers that make what is at an address, by address.
        gain: Bytes that are not saved.
        cost: Of running them again.
    """

    chosen: Chosen
    makers: dict[int, list[Layer]]
    gain: int
    cost: float


def ways_of(seen: Seen, droppable: dict[int, int]) -> Iterator[Dropped]:
    """Sets of layers, first all that cost next to nothing; then others, the best first.

    Args:
        seen: The block, as it was seen.
        droppable: Bytes of what it saves and need not, by address.
    """
    chosen = [layer for layer in seen.layers if layer.cost <= _CHEAP * seen.cost]
    left = [layer for layer in seen.layers if layer.cost > _CHEAP * seen.cost]
    best = _dropped(seen, chosen, droppable)
    yield best
    for _ in range(_WAYS - 1):
        more = [(_dropped(seen, [*chosen, layer], droppable), layer) for layer in left]
        worth = [
            ((way.gain - best.gain) / (way.cost - best.cost), i)
            for i, (way, _) in enumerate(more)
            if way.gain > best.gain and way.cost > best.cost
        ]
        if not worth:
            return
        best, layer = more[max(worth)[1]]
        chosen.append(layer)
        left.remove(layer)
        yield best


def _dropped(seen: Seen, wanted: Sequence[Layer], droppable: dict[int, int]) -> Dropped:
    """What not keeping the outputs of some layers comes to, as far as it is possible."""
    asked = {id(layer) for layer in wanted}
    makers: dict[int, list[Layer]] = {}
    for layer in seen.layers:
        address, _ = layer.output
        # A layer that writes to its input can be run again on what is made for it alone.
        before = makers.pop(address, None) if address in layer.inputs else []
        # What was written to after the layer has seen it is there no more, unless it is made again.
        there = (seen.saved.keys() - layer.stale) | makers.keys()
        possible = layer.sound and layer.inputs - {address} <= there
        if id(layer) in asked and before is not None and possible:
            makers[address] = [*before, layer]
    needed: list[Layer] = []
    for layer in reversed(seen.layers):
        address = layer.output[0]
        used = address in droppable or any(address in other.inputs for other in needed)
        if used and any(layer is other for other in makers.get(address, ())):
            needed.append(layer)
    made = {layer.output[0] for layer in needed}
    chosen: dict[Any, frozenset[int]] = {}
    for layer in needed:
        chosen[layer.module] = chosen.get(layer.module, frozenset()) | {layer.nth}
    return Dropped(
        chosen,
        {address: layers for address, layers in makers.items() if address in made},
        sum(droppable.get(address, 0) for address in made),
        sum(layer.cost for layer in needed),
    )


def peak_of(seen: Seen, own: dict[int, int], way: Dropped) -> int:
    """Bytes at most while the backward pass of a block runs, where some are made again.

    Args:
        seen: The block, as it was seen.
        own: Bytes of what it saves beyond its input, by address.
        way: What is not kept.
    """
    users = Counter(seen.places)
    there = {address for address in own if address not in way.makers}
    now = peak = sum(own[address] for address in there)

    def make(address: int) -> None:
        nonlocal now, peak
        for layer in way.makers[address]:
            for needed in layer.inputs - {address}:
                if needed in way.makers and needed not in there:
                    make(needed)
        if users[address] and address in own:
            there.add(address)
            now += own[address]
            peak = max(peak, now)

    for number in seen.asked:
        address = seen.places[number]
        if address in way.makers and address not in there:
            make(address)
        users[address] -= 1
        if not users[address] and address in there:
            there.remove(address)
            now -= own[address]
    return peak
