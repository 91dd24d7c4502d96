"""Blocks that are found in a model, and the plan that is made of what they save."""

from __future__ import annotations

import keras
import pytest
from keras import layers

from keras_ext._table import Call, Measured
from keras_ext._units import chosen, units_of
from tests.keras_ext.recompute_models import MODELS, Block, residual


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_are_found(kind: str) -> None:
    found = {name: layer.name for name, layer in units_of(MODELS[kind]()).items()}
    expected = {f"block_{i}" for i in range(2 if kind == "shared" else 3)}
    assert set(found.values()) == expected
    assert set(found) == expected


def test_blocks_of_a_nested_model_have_paths() -> None:
    inner = residual()
    inputs = keras.Input((8, 4))
    model = keras.Model(inputs, layers.Dense(1)(inner(inputs)))
    assert set(units_of(model)) == {f"{inner.name}/block_{i}" for i in range(3)}
    assert set(chosen(model, [f"{inner.name}/block_1"])) == {f"{inner.name}/block_1"}
    assert set(chosen(model, [inner.name, "block_1"])) == {inner.name}
    assert chosen(model, [Block]) == {}


def test_single_layers_are_no_blocks() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(4)])
    assert units_of(model) == {}


def calls(*names: str) -> list[Call]:
    return [
        Call(name, saved=100, output=10, cost=1.0, linked=i > 0) for i, name in enumerate(names)
    ]


def test_a_chain() -> None:
    table = Measured(calls(*"abc"), 5, ((2, 3),)).table()
    # Outputs that the next call takes are held; that of the last is not.
    assert [block.saved for block in table.blocks] == [110, 110, 100, 5]
    assert table.plain_peak == 325
    plan = table.plan(325)
    assert table.chosen(plan) == frozenset()
    plan = table.plan(240)
    assert plan.fits
    assert len(table.chosen(plan)) in (1, 2)


def test_all_calls_of_a_block_are_run_again_or_none() -> None:
    table = Measured(calls(*"aba"), 0, ()).table()
    for budget in range(100, 330, 10):
        plan = table.plan(budget)
        names = [table.names[span.start] for span in plan.spans]
        assert names.count("a") in (0, 2)
        assert plan.extra == len(names)
        assert plan.peak <= table.plain_peak


def test_a_call_that_turns_out_to_be_code() -> None:
    measured = Measured(calls(*"abc"), 5, ((2, 3),), forward=4.0)
    left = measured.without({"b"})
    assert left is not None
    # What "b" saves, its output and its input, the output of "a", are held by code.
    assert [(block.name, block.saved) for block in left.table().blocks] == [
        ("a", 100), ("other code", 120), ("c", 100), ("other code", 5)
    ]  # fmt: skip
    assert left.table().plain_peak == measured.table().plain_peak
    assert left.table().forward == 4.0
    assert measured.without({"a", "b", "c"}) is None
