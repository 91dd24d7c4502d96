"""What `exclude=` names is never run again."""

from __future__ import annotations

import copy
import warnings

import pytest

from lightning_ext import DynamicGradientCheckpointing
from tests.lightning_ext.test_gradient_checkpointing import batches, fit, made, same


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (["network.blocks"], {"network.embed", "network.norm", "network.head"}),
        (["network.blocks.0.mlp.1"], {f"network.blocks.{i}" for i in range(1, 6)}),
        (["network"], set()),
    ],
)
def test_excluded_are_blocks_in_and_around_what_is_named(
    exclude: list[str], left: set[str]
) -> None:
    plain, x = made("transformer")
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.9, exclude=exclude)
    fit(plain, batches(x))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, batches(x), callback)
    assert same(plain, module)
    names = {b.name for b in callback.report_.blocks} if callback.report_ else set()
    assert left <= names
    assert not any(name.startswith(f"{exclude[0]}.") or name == exclude[0] for name in names)
    told = [str(w.message) for w in caught if "nothing can be run again" in str(w.message)]
    assert len(told) == (not left)
    assert all("besides those that exclude= names" in text for text in told)
