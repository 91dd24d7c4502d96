"""Arguments of `DynamicGradientCheckpointing` that cannot be meant, and two of it in one fit."""

from __future__ import annotations

from typing import Any

import pytest

from keras_ext import DynamicGradientCheckpointing
from tests.keras_ext.recompute_models import built
from tests.keras_ext.test_gradient_checkpointing import fit, saver, untouched


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"memory_budget": 0.0}, ValueError, "memory_budget=0.0: pass a share"),
        ({"memory_budget": "lots"}, ValueError, "memory_budget='lots': pass"),
        ({"memory_budget": None}, TypeError, "memory_budget=None: pass"),
        ({"blocks": 3}, TypeError, "blocks=3: pass a list of classes"),
        ({"blocks": []}, ValueError, r"blocks=\[\]: pass at least one"),
        ({"exclude": [int]}, TypeError, r"exclude=\[<class 'int'>\]: pass a list of classes"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        DynamicGradientCheckpointing(**options)


@pytest.mark.parametrize("argument", ["blocks", "exclude"])
def test_names_that_are_not_there(argument: str) -> None:
    model = built("transformer")
    with pytest.raises(ValueError, match=f"{argument}=.*has no 'blok_1'; pass.*mean 'block_1'"):
        fit(model, saver(**{argument: ["block_1", "blok_1"]}))
    assert untouched(model)


def test_two_in_one_fit() -> None:
    model = built("transformer")
    with pytest.raises(ValueError, match="two DynamicGradientCheckpointing callbacks"):
        fit(model, saver(), saver())
    assert untouched(model)
    ours = saver()
    with pytest.raises(ValueError, match="two DynamicGradientCheckpointing callbacks"):
        fit(model, ours, ours)
    assert untouched(model)
    fit(model, ours)
    assert ours.plan_.spans
    assert untouched(model)
