"""All plans of a few blocks, and what each of them costs, by walking through a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategies.checkpointing import Block, Span

Choice = tuple[tuple[Span, ...], tuple[tuple[int, int], ...]]


def walked(
    blocks: Sequence[Block], choice: Choice, s: int, t: int, held: int = 0
) -> tuple[int, float]:
    """Highest memory and cost of recomputation of a forward and backward pass of `s` to `t`."""
    spans, partial = {span.start: span for span in choice[0]}, dict(choice[1])
    stack: list[tuple[int | Span, int]] = []
    memory, peak, extra, i = held, held, 0.0, s
    while i <= t:
        if i in spans:
            item: int | Span = spans[i]
            extra += sum(block.cost for block in blocks[i : spans[i].stop])
            i = spans[i].stop
            left = blocks[i - 1].output - blocks[i - 1].loose
        else:
            item, left = i, blocks[i].saved
            if i in partial:
                left, again, _ = blocks[i].partial[partial[i]]
                extra += again
            i += 1
        if i in spans:
            left += blocks[i - 1].loose
        if i > t and not isinstance(item, Span):
            left -= blocks[t].handed
        stack.append((item, left))
        memory += left
        peak = max(peak, memory)
    for item, left in reversed(stack):
        memory -= left
        if isinstance(item, Span):
            inner = item.inner, item.partial
            high, again = walked(blocks, inner, item.start, item.stop - 1, memory)
            peak, extra = max(peak, high), extra + again
        else:
            block = blocks[item]
            work = block.saved + block.transient
            if item in partial:
                work = block.partial[partial[item]].peak
            if item == t:
                work -= block.handed
            peak = max(peak, memory + work)
    return peak, extra


def choices(
    blocks: Sequence[Block], allowed: set[tuple[int, int]], s: int, t: int
) -> Iterator[Choice]:
    """Every plan of `s` to `t`, nested ones included."""
    if s > t:
        yield (), ()
        return
    for spans, partial in choices(blocks, allowed, s + 1, t):
        yield spans, partial
        for way in range(len(blocks[s].partial)):
            yield spans, ((s, way), *partial)
    for middle in range(s + 1, t + 1):
        if (s, middle) not in allowed:
            continue
        within = list(choices(blocks, allowed, s, middle - 1))
        for spans, partial in choices(blocks, allowed, middle, t):
            for found in within:
                yield (Span(s, middle, *found), *spans), partial
