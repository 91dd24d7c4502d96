"""What `exclude=` names is never run again; that nothing is, or two want to, is said."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ext import DynamicGradientCheckpointing
from tests.lightning_ext.test_gradient_checkpointing import Module, batches, fit, made, same


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
    assert all("as exclude= leaves none of its 9 blocks" in text for text in told)


class Direct(Module):
    """Uses weights of its layers, which are called by nobody."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] @ self.network.weight.T).square().mean()


class Flat(Direct):
    """Has a weight and no layers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(nn.Identity())
        del self.network
        self.weight = nn.Parameter(torch.ones(3, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] @ self.weight.T).square().mean()


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Flat, "the module has no modules of its own"), (Direct, "or not called as modules")],
)
def test_that_nothing_is_run_again_is_said_once(kind: type[Module], why: str) -> None:
    callback = DynamicGradientCheckpointing(0.5)
    with pytest.warns(UserWarning, match=f"^DynamicGradientCheckpointing: nothing .*{why}") as told:
        fit(kind(nn.Linear(4, 3)), batches(torch.ones(2, 4), 5), callback)
    (text,) = (str(w.message) for w in told if "run again" in str(w.message))
    assert "blocks=" in text
    assert callback.report_ is None
    assert [d.action for d in callback.decisions_] == ["fall back"]


def test_two_in_one_trainer() -> None:
    module, x = made("mlp")
    two = [DynamicGradientCheckpointing(0.5) for _ in range(2)]
    with pytest.raises(ValueError, match="two DynamicGradientCheckpointing callbacks are in one"):
        fit(module, batches(x), *two)
    assert module.seen == []
