"""A step with blocks recomputed is the plain step, bit for bit, within the memory planned."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._memory import Peak
from lightning_ext.recompute.blocks import Applied, Table
from lightning_ext.recompute.runner import Runner
from lightning_ext.recompute.units import units_of
from strategies.checkpointing import Span
from tests.lightning_ext.recompute.models import MODELS

WIDTH, BLOCKS = 16, 6


class Block(nn.Module):
    """Attention in every other one, dropout, batch norm, an argument besides."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.norm, self.batch = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.attention = (
            nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True) if attention else None
        )
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = self.norm(x)
        if self.attention is not None:
            x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(x)
        out: Tensor = self.batch(x.flatten(0, 1)).view_as(x) * scale
        return out


class Model(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block(bool(i % 2)) for i in range(BLOCKS))
        self.order, self.between = list(range(BLOCKS)), between

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.first(x), torch.linspace(0.9, 1.1, WIDTH)
        for i in self.order:
            x = self.between(self.blocks[i](x, scale=scale))
        out: Tensor = self.last(x)
        return out


def batch() -> Tensor:
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def step(
    model: nn.Module, runner: Runner | None, x: Tensor, autocast: bool = False, twice: bool = False
) -> list[Tensor]:
    """Loss, the next random numbers, gradients and buffers."""
    torch.manual_seed(5)
    model.zero_grad()
    runner = runner or Runner({})
    with runner.step(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    if twice:  # as a penalty on gradients does
        held = [p for p in model.parameters() if p.requires_grad]
        slopes = torch.autograd.grad(loss, held, create_graph=True, allow_unused=True)
        loss = loss + sum(slope.square().sum() for slope in slopes if slope is not None)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), torch.rand(2), *gradients, *(b.clone() for b in model.buffers())]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def planned(model: Model, spans: list[Span]) -> Runner:
    runner = Runner({f"blocks.{i}": block for i, block in enumerate(model.blocks)})
    order = tuple((f"blocks.{i}", 0) for i in range(BLOCKS))
    runner.apply(Applied(order, tuple(spans), {}, frozenset()))
    return runner


def measured(model: nn.Module, x: Tensor) -> tuple[Runner, Table, list[Tensor]]:
    runner = Runner(units_of(model))
    runner.measure([*model.parameters(), *model.buffers(), x])
    found = step(model, runner, x)
    table = runner.measured()
    assert table is not None
    return runner, table, found


def drawn(rng: random.Random, start: int, stop: int, depth: int = 0) -> list[Span]:
    """Runs of blocks, nested."""
    spans = []
    while start < stop:
        end = rng.randint(start + 1, stop)
        if rng.random() < 0.6:
            inner = drawn(rng, start, end, depth + 1) if end - start > 1 and depth < 3 else []
            spans.append(Span(start, end, tuple(inner)))
            start = end
        else:
            start += 1
    return spans


@pytest.mark.parametrize("autocast", [False, True])
def test_bit_for_bit(autocast: bool) -> None:
    plain, rng = Model(), random.Random(1)
    expected = step(copy.deepcopy(plain), None, batch(), autocast)
    for _ in range(20):
        model, spans = copy.deepcopy(plain), drawn(rng, 0, BLOCKS)
        assert same(step(model, planned(model, spans), batch(), autocast), expected), spans


def test_gradients_of_gradients() -> None:
    plain = Model()
    expected = step(copy.deepcopy(plain), None, batch(), twice=True)
    model = copy.deepcopy(plain)
    runner = planned(model, [Span(0, 1), Span(2, 5, (Span(3, 4),))])
    assert same(step(model, runner, batch(), twice=True), expected)


def count_calls(model: Model) -> Counter[int]:
    counts: Counter[int] = Counter()
    for i, block in enumerate(model.blocks):
        block.mlp.register_forward_hook(lambda *_, i=i: counts.update([i]))
    return counts


def test_every_block_runs_as_often_as_planned() -> None:
    model = Model()
    counts = count_calls(model)
    step(model, planned(model, [Span(0, 1), Span(2, 5, (Span(3, 4),))]), batch())
    # 3 is run through without a graph when its run is recomputed, and once more for its own.
    assert counts == {0: 2, 1: 1, 2: 2, 3: 3, 4: 2, 5: 1}


@pytest.mark.parametrize("order", [[0, 1, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 0, 1, 2, 2, 2], [2]])
def test_other_orders_than_planned(order: list[int]) -> None:
    plain, model = Model(), Model()
    plain.order = model.order = order
    runner = planned(model, [Span(0, 3, (Span(1, 2),)), Span(3, 5)])
    assert same(step(model, runner, batch()), step(plain, None, batch()))


def test_code_between_blocks_that_writes_to_their_outputs() -> None:
    # The blocks after it get the same tensor object, with other values.
    plain = Model(lambda x: x.add_(1.0))
    model = copy.deepcopy(plain)
    runner, table, found = measured(model, batch())
    expected = step(copy.deepcopy(plain), None, batch())
    assert same(found, expected)
    model.load_state_dict(plain.state_dict())
    runner.apply(table.applied(table.plan(0)))
    assert same(step(model, runner, batch()), expected)


def test_nothing_where_nothing_is_asked_for() -> None:
    model = Model()
    counts, runner = count_calls(model), planned(model, [Span(0, BLOCKS)])
    with runner.step(), torch.no_grad():
        model(batch())
    model(batch()).sum().backward()
    assert set(counts.values()) == {2}


def test_copies_are_left_alone() -> None:
    model = Model()
    runner = planned(model, [Span(0, BLOCKS)])
    other = copy.deepcopy(model)
    counts = count_calls(other)
    with runner.step():
        other(batch()).sum().backward()
    assert set(counts.values()) == {1}


def test_modules_are_given_back() -> None:
    model = Model()
    names, before = [*model.state_dict()], {m: dict(vars(m)) for m in model.modules()}
    runner, table, _ = measured(model, batch())
    runner.apply(table.applied(table.plan(0)))
    runner.detach()
    assert [*model.state_dict()] == names
    for module, attributes in before.items():
        assert vars(module).keys() == attributes.keys()
        assert not any(len(vars(module)[name]) for name in vars(module) if "_hooks" in name)


def test_a_forward_that_changes_is_an_error() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x)
            return out.tanh() if mode["tanh"] else out

    odd, mode = Odd(), {"tanh": True}
    runner: Any = Runner({"odd": odd})
    runner.apply(Applied((("odd", 0),), (Span(0, 1),), {}, frozenset()))
    with runner.step():
        loss = odd(torch.ones(1, 2, requires_grad=True)).sum()
    mode["tanh"] = False
    message = "odd cannot be run again .* it saved 3 tensors when it was run, and 2, or others"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


@pytest.mark.parametrize("name", MODELS)
def test_models_within_budgets(name: str) -> None:
    make, data = MODELS[name]
    torch.manual_seed(0)
    plain, x = make(), data()
    with Peak() as peak:
        expected = step(copy.deepcopy(plain), None, x)
    whole = peak.highest
    for share in (0.8, 0.6, 0.4, 0.2):
        model = copy.deepcopy(plain)
        runner, table, found = measured(model, x)
        assert same(found, expected)  # every block was run again
        model.load_state_dict(plain.state_dict())
        plan = table.plan(share * table.plain_peak)
        runner.apply(table.applied(plan))
        with Peak() as peak:
            assert same(step(model, runner, x), expected)
        assert plan.fits or plan.peak == table.plan(0).peak
        # Besides what graphs save, torch holds gradients, and what operators need for a moment.
        assert peak.highest <= plan.peak + (whole - plan.plain_peak) + 2 * peak.largest


def test_memory_is_what_was_predicted() -> None:
    make, data = MODELS["transformer"]
    torch.manual_seed(0)
    model, x = make(), data()
    runner, table, _ = measured(model, x)
    peaks = []
    for share in range(20, 0, -1):
        plan = table.plan(share / 20 * table.plain_peak)
        runner.apply(table.applied(plan))
        peaks.append(runner.held([*model.parameters(), x], lambda: step(model, runner, x)))
        assert plan.peak * 0.95 <= peaks[-1] <= plan.peak
    assert peaks == sorted(peaks, reverse=True)


def test_attention_that_gets_its_input_three_times() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.relu(layer(x, x, x, need_weights=False)[0])
            return x

    model, x = Three(), batch()
    expected = step(copy.deepcopy(model), None, x)
    runner, table, found = measured(model, x)
    assert same(found, expected)
    runner.apply(table.applied(table.plan(0)))
    assert same(step(model, runner, x), expected)
