"""Recomputation where parameters or stages are divided over ranks, and in compiled code."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ext import DynamicGradientCheckpointing
from tests.lightning_ext.recompute.models import Transformer, tokens
from tests.lightning_ext.test_gradient_checkpointing import Module, batches, fit, same


def test_two_ranks(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command, "tests.lightning_ext.recompute.ranks", tmp_path],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, found in enumerate(ranks):
        steps = {"ddp": 5, "fsdp": 5, "pipeline": 20 * rank * 2, "tensor": 10}
        for kind, result in found.items():
            assert result["same"], (kind, rank)
            assert result["steps"] == steps[kind]
            assert result["extra"] > 0
            if kind != "tensor":  # what is gathered for a moment is not predicted
                measured = result["measured"]
                assert result["predicted"] * 0.95 <= measured <= result["predicted"], (kind, rank)
    # Ranks that wait for each other follow the one with the least memory.
    assert ranks[0]["tensor"]["extra"] == ranks[1]["tensor"]["extra"]


class Quiet(Module):
    """Logs nothing: Lightning's `self.log` cannot be compiled."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.network(batch[0]).square().mean()
        return loss


def compile_blocks(module: Module) -> None:
    for i, block in enumerate(module.network.blocks):
        module.network.blocks[i] = torch.compile(block, backend="aot_eager")


def compile_in_place(module: Module) -> None:
    module.network.compile(backend="aot_eager")


def compile_module(module: Module) -> Any:
    return torch.compile(module, backend="aot_eager")


# torch's compiler looks at gradients of whatever it meets.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("how", [compile_blocks, compile_in_place, compile_module])
def test_compiled(how: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    plain = Quiet(Transformer(3))
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.5)
    fits = [each if (found := how(each)) is None else found for each in (plain, module)]
    fit(fits[0], batches(tokens(), 4))
    if how is not compile_blocks:
        with pytest.warns(UserWarning, match="nothing can be run again, as all of the model is"):
            fit(fits[1], batches(tokens(), 4), callback)
        assert callback.plan_ is None
    else:
        fit(fits[1], batches(tokens(), 4), callback)
        assert callback.report_ is not None
        assert callback.report_.measured is not None
        assert callback.report_.measured <= callback.report_.plan.budget
    assert same(plain, module)
    torch.compiler.reset()


def test_a_model_that_is_compiled_as_one_is_told_and_not_run_again_for_nothing() -> None:
    torch.manual_seed(0)
    module = Module(torch.compile(Transformer(3), backend="eager"))
    callback = DynamicGradientCheckpointing(0.5)
    with pytest.warns(UserWarning, match="save next to nothing.* network was compiled as one"):
        fit(module, batches(tokens(), 2), callback)
    assert callback.report_ is not None
    assert callback.report_.extra == 0
    assert any("Compile its blocks one by one" in text for text in callback.report_.advice)
    torch.compiler.reset()


def test_modules_that_are_torchs_own() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
            self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
            self.encoder = nn.TransformerEncoder(layer, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.encoder(self.embed(x)))
            return out

    torch.manual_seed(0)
    plain = Module(Encoder())
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.3)
    fit(plain, batches(tokens()))
    fit(module, batches(tokens()), callback)
    assert same(plain, module)
    assert callback.plan_ is not None
    assert callback.plan_.fits
