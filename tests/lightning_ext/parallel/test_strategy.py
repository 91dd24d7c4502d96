"""What is wrong is said before any process is started."""

from __future__ import annotations

import copy
import pickle
import random
import re
import sys
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from lightning_ext import PipelinePart, ThreeDParallelStrategy
from lightning_ext._best_weights import require_whole_model
from lightning_ext.parallel.calls import OnStages, inputs_of, with_output
from lightning_ext.parallel.division import check_undivided, divide
from lightning_ext.parallel.logs import combined_outputs
from lightning_ext.parallel.microbatches import batch_size, chunks, count_for, kept, mixed, seed
from lightning_ext.parallel.parts import find_pipeline
from lightning_ext.parallel.region import writes
from lightning_ext.parallel.split import drop_foreign
from lightning_ext.parallel.summary import summary, warn_of_whole
from strategies.parallel import Layout
from tests.lightning_ext.parallel.models import Module


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def check(
    devices: int, arguments: dict[str, Any], module: pl.LightningModule, **options: Any
) -> None:
    strategy = ThreeDParallelStrategy(**arguments)
    module.trainer = pl.Trainer(
        devices=devices, accelerator="cpu", strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options
    )  # fmt: skip
    strategy.connect(module)
    strategy.setup_environment()


@pytest.mark.parametrize(
    ("devices", "arguments", "message"),
    [
        (3, {"pipeline": 2}, "devices=3 cannot be laid out as pipeline=2"),
        (2, {"data": 3}, "devices=2 cannot be laid out"),
        (16, {"pipeline": 16}, "pipeline=16 is more than the 11 parts of 'model'; pass at most"),
        (3, {"tensor": 3}, "tensor=3 does not divide the 4 heads of 'model.h.0.attn'; pass"),
        (2, {"pipeline": 2, "pipeline_module": "mdel"}, "'mdel' is no module of the model"),
        (2, {"pipeline": 2, "pipeline_module": "model.h.0"}, "is no nn.Sequential and has no"),
        (2, {"pipeline": 2, "layers_per_stage": [3, 4]}, "layers_per_stage=[3, 4] adds up to 7"),
        (2, {"tensor": 2, "tensor_plan": {"foo": "row"}}, "the pattern 'foo' fits no linear layer"),
        (2, {"tensor": 0}, "tensor=0 must be a whole number >= 1"),
        (2, {"schedule": "zbv"}, "schedule must be one of gpipe, 1f1b, got 'zbv'"),
        (2, {"shard_parameters": True}, "shard_parameters=True is not there yet; leave shard"),
        (2, {"sequence_parallel": True}, "sequence_parallel=True is not there yet; leave"),
        (4, {"pipeline": 4, "microbatches": 2}, "microbatches=2 are fewer than pipeline=4 stages"),
    ],
)
def test_sizes_and_names(devices: int, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(devices, arguments, Module())
    assert not torch.distributed.is_initialized()


def test_manual_optimization() -> None:
    with pytest.raises(ValueError, match="cannot run manual optimization"):
        check(2, {"data": 2}, Manual())


def test_averages_of_weights() -> None:
    with pytest.raises(ValueError, match="StochasticWeightAveraging is not supported with pipel"):
        check(2, {"pipeline": 2}, Module(), callbacks=[StochasticWeightAveraging(0.1)])


def test_complex_parameters() -> None:
    module = pl.LightningModule()
    module.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="cannot train complex parameters"):
        divide(module, 2, 1)


def test_a_copy_of_a_module_in_stages() -> None:
    layer = nn.Linear(2, 2)
    object.__setattr__(layer, "forward", OnStages("model", lambda args, kwargs: (args, kwargs)))
    with torch.no_grad():
        assert layer(1, a=2) == ((1,), {"a": 2})
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with pytest.raises(RuntimeError, match="'model' was copied on one of several stages"):
            other(1)


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (torch.Tensor.__setitem__, {}, True),
        (torch.Tensor.cumsum_, {}, True),
        (torch.add, {"out": torch.ones(1)}, True),
        (torch.add, {}, False),
        (torch.Tensor.__add__, {}, False),
    ],
)
def test_what_is_written_to_is_not_copied(
    function: Any, options: dict[str, Any], expected: bool
) -> None:
    assert writes(function, options) == expected


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "tensor=2 splits nothing of this model"),
        (nn.TransformerEncoderLayer(4, 2), "nn.MultiheadAttention is not split, each rank compu"),
    ],
)
def test_what_is_not_split_is_said(model: nn.Module, message: str) -> None:
    module = pl.LightningModule()
    module.model = model
    with pytest.warns(UserWarning, match=message):
        warn_of_whole(divide(module, 1, 2)[2], 2)


def test_batch_norm_over_ranks() -> None:
    with pytest.raises(ValueError, match="sync_batchnorm=True is not supported"):
        check(2, {"pipeline": 2}, Module(), sync_batchnorm=True)


@pytest.mark.parametrize("pieces", [{"device": "meta"}, {}])
def test_a_module_that_is_divided_already(pieces: dict[str, str]) -> None:
    module = nn.Linear(2, 2, **pieces)  # type: ignore[arg-type]
    if not pieces:
        check_undivided(module)
        return
    with pytest.raises(ValueError, match="already divided by another ThreeDParallelStrategy"):
        check_undivided(module)


def test_layers_that_are_made_when_the_processes_are_connected() -> None:
    class Late(pl.LightningModule):
        def configure_model(self) -> None:
            self.model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    strategy = ThreeDParallelStrategy(pipeline=2)
    strategy._check_early(Late())
    with pytest.raises(ValueError, match="has 0 modules that can be cut"):
        strategy._check_early(pl.LightningModule())


def test_which_process_this_is_before_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # put back afterwards
    monkeypatch.setenv("LOCAL_RANK", "3")
    trainer = pl.Trainer(
        devices=4, accelerator="cpu", logger=False, strategy=ThreeDParallelStrategy(pipeline=2)
    )
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}
    assert not trainer.is_global_zero


def test_scaled_gradients() -> None:
    strategy = ThreeDParallelStrategy(data=2)
    plugin: Any = Precision()
    plugin.scaler = object()
    strategy.precision_plugin = plugin
    with pytest.raises(ValueError, match="precision='16-mixed' is not supported; pass 'bf16-mixed"):
        strategy._check(nn.Linear(1, 1))


def test_best_weights_are_not_on_one_rank() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, logger=False, strategy=ThreeDParallelStrategy(pipeline=2)
    )
    with pytest.raises(ValueError, match="ThreeDParallelStrategy shards it; pass restore_best"):
        require_whole_model(trainer, "ModelCheckpoint")


def test_what_a_step_returns_beside_the_loss() -> None:
    found = combined_outputs([
        {"loss": 1, "names": ["a"], "more": {"x": torch.ones(2)}, "mean": torch.tensor(1.0)},
        {"loss": 2, "names": ["b"], "more": {"x": torch.zeros(1)}, "mean": torch.tensor(2.0)},
    ])  # fmt: skip
    assert found["names"] == ["a", "b"]
    assert found["more"]["x"].tolist() == [1, 1, 0]
    assert found["mean"] == 1.5
    assert combined_outputs([torch.ones(())]) == {}


def test_what_is_tied_stays_tied_on_other_stages() -> None:
    root = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    head: Any = root["head"]
    head.weight = root["embedding"].weight
    drop_foreign(root, {"embedding.weight": (0,), "head.weight": (0,)}, 1)
    assert head.weight is root["embedding"].weight
    assert head.weight.is_meta
    assert len([*root.parameters()]) == 1


def test_whole_numbers() -> None:
    with pytest.raises(TypeError, match=r"pipeline=2\.0 must be a whole number"):
        ThreeDParallelStrategy(pipeline=2.0)  # type: ignore[arg-type]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def pipeline_parts(self) -> list[Any]:
        return [PipelinePart(lambda x: self.first(x))]


def test_a_forgotten_parameter() -> None:
    root = nn.Module()
    root.net = Parts()
    with pytest.raises(ValueError, match=r"parts of 'net' do not use its parameter 'first.weight'"):
        find_pipeline(root, None, 1)


def test_which_module_to_cut() -> None:
    root = nn.Module()
    with pytest.raises(ValueError, match="has 0 modules that can be cut into stages; name one"):
        find_pipeline(root, None, 2)
    root.a, root.b = (nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(2))
    with pytest.raises(ValueError, match=r"has 2 modules that can be cut into stages \(a, b\)"):
        find_pipeline(root, None, 2)
    assert find_pipeline(root, "b", 2).module is root.b


class TestCalls:
    def test_inputs_without_what_comes_after(self) -> None:
        model = nn.Linear(2, 1)
        after: list[int] = []

        def step() -> None:
            try:
                model(torch.ones(3, 2))
            except Exception:
                after.append(1)
            after.append(2)

        (given,), named = inputs_of(model, "model", step)
        assert given.shape == (3, 2)
        assert (named, after) == ({}, [])
        assert "forward" not in vars(model)

    def test_no_call_and_two(self) -> None:
        model = nn.Linear(2, 1)
        with pytest.raises(RuntimeError, match="ended without calling the pipelined"):
            inputs_of(model, "model", lambda: None)
        with pytest.raises(RuntimeError, match="calls the pipelined module 'model' more than once"):
            with_output(model, "model", 0, lambda: [model(1), model(1)])
        assert with_output(model, "model", 7, lambda: model(1)) == 7


class TestMicrobatches:
    def test_tensors_of_the_size_of_the_batch_are_cut(self) -> None:
        batch = {
            "x": torch.arange(8).view(4, 2),
            "y": [torch.arange(4)],
            "w": torch.ones(3),
            "n": 1,
        }
        parts = chunks(batch, 2)
        assert torch.equal(torch.cat([p["x"] for p in parts]), batch["x"])
        assert torch.equal(parts[1]["y"][0], torch.tensor([2, 3]))
        assert all(len(p["w"]) == 3 and p["n"] == 1 for p in parts)

    def test_lists_of_other_things_are_cut_with_them(self) -> None:
        batch = {"x": torch.arange(4), "names": ["a", "b", "c", "d"], "size": (4, 4, 4, 4)}
        first, second = chunks(batch, 2)
        assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
        assert second["x"].tolist() == [2, 3]
        assert first["size"] == (4, 4, 4, 4)

    @pytest.mark.parametrize("size", range(1, 25))
    def test_as_many_as_divide(self, size: int) -> None:
        for wanted in (1, 4, 6):
            count = count_for(size, wanted, 2)
            divisors = [n for n in range(1, wanted + 1) if size % n == 0]
            assert count == max(divisors)

    def test_an_empty_batch(self) -> None:
        with pytest.raises(ValueError, match="the batch is empty"):
            count_for(0, 4, 2)

    def test_no_tensor(self) -> None:
        with pytest.raises(ValueError, match="the batch, a list, has no tensor with a batch dim"):
            batch_size([1, "a"])

    def test_seeds_are_repeated_and_leave_nothing(self) -> None:
        def draw() -> tuple[float, float, float]:
            return float(torch.rand(())), float(np.random.rand()), random.random()

        states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
        base = mixed(1, 2)
        with kept():
            seed(base)
            first = draw()
            seed(base)
            assert draw() == first
            others = [(seed(base, i), draw())[1] for i in range(1, 5)]
            seed(mixed(1, 3))
            others.append(draw())
        for i, drawn in enumerate(zip(first, *others, strict=True)):
            assert len(set(drawn)) == 6, i  # torch, numpy and Python each draw anew
        assert torch.equal(torch.get_rng_state(), states[0])
        assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
        assert random.getstate() == states[2]


def test_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module(blocks=4)
    strategy = ThreeDParallelStrategy(pipeline=2, tensor=2, microbatches=4)
    pipeline, stages = strategy._check(module)
    layout = Layout(2, 1, 2)
    arguments = (module, layout, pipeline, stages, strategy.plan, "1f1b", 4)
    told = summary(*arguments, plain=True).splitlines()
    assert told[0] == "pipeline=2 x data=1 x tensor=2 (4 ranks)"
    assert re.split(r"  +", told[1])[:3] == ["stage", "parts", "parameters per rank"]
    # The embedding (32 x 16, split in two, tied to the head), positions (8 x 16), and of each
    # block two norms (64), biases that stay whole (32), and half of 3,072 weights and 112 biases.
    block = 64 + 32 + 3072 // 2 + (48 + 64) // 2
    expected = 32 * 16 // 2 + 8 * 16 + (len(stages[0]) - 1) * block
    size = f"{4 * expected / 1024:.0f} KiB"  # and twice that for Adam
    row = re.split(r"  +", told[2])
    assert row[1].startswith("embed, h.0")
    assert [row[0], *row[2:5]] == ["0", f"{expected:,}", size, size]
    assert row[5] == f"{8 * expected / 1024:.0f} KiB"
    assert told[4] == (
        "  split by column: model.h.0.attn.c_attn, model.h.0.mlp.0, ..., model.h.3.mlp.0"
    )
    assert told[6] == "  split by vocab: model.wte, model.lm_head"
    assert told[-1].startswith("  1f1b, 4 microbatches: idle ")
    assert told[-1].endswith("at most 2 in flight")

    # Drawn by rich, the same cells; without it, the plain text.
    drawn = summary(*arguments)
    assert drawn.isascii()
    for cell in (*row[1:], *re.split(r"  +", told[3])[1:]):
        assert f" {cell} " in drawn
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert summary(*arguments).splitlines() == told


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"pipeline_module": 3}, TypeError, "pipeline_module=3: pass a name"),
        ({"process_group_backend": 3}, TypeError, "process_group_backend=3: pass a name"),
        ({"tensor_plan": "row"}, TypeError, "tensor_plan='row': pass a dict"),
        ({"tensor_plan": {1: "row"}}, TypeError, "tensor_plan={1: 'row'}: pass a dict"),
        ({"layers_per_stage": "12"}, TypeError, "layers_per_stage='12': pass a number"),
        ({"layers_per_stage": [1.5]}, TypeError, "layers_per_stage=[1.5]: pass a number"),
        ({"timeout": "1"}, TypeError, "timeout='1': pass seconds"),
        ({"timeout": 0}, ValueError, "timeout=0: pass seconds"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan: pass seconds"),
    ],
)
def test_other_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        ThreeDParallelStrategy(**arguments)


def test_whole_numbers_of_numpy() -> None:
    assert ThreeDParallelStrategy(pipeline=np.int64(2), microbatches=np.int32(4)).pipeline == 2


def test_parts_say_what_they_take() -> None:
    with pytest.raises(TypeError, match=r"takes='mask' of a PipelinePart: pass a tuple"):
        PipelinePart(torch.relu, takes="mask")
    with pytest.raises(TypeError, match=r"modules=Linear"):
        PipelinePart(torch.relu, modules=nn.Linear(1, 1))  # type: ignore[arg-type]

    class Parts(nn.Module):
        def __init__(self, takes: str) -> None:
            super().__init__()
            self.first, self.last, self.takes = nn.Embedding(3, 2), nn.Linear(2, 2), takes

        def pipeline_parts(self) -> list[Any]:
            return [PipelinePart(self.first, takes=(self.takes,)), self.last]

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
            return self.last(self.first(tokens))

    with pytest.raises(ValueError, match=r"has no argument 'token'; it has tokens, mask"):
        find_pipeline(nn.ModuleDict({"model": Parts("token")}), "model", 2)
    # A module takes them in order, whatever its own names are.
    pipeline = find_pipeline(nn.ModuleDict({"model": Parts("tokens")}), "model", 2)
    inputs = pipeline.bind((torch.tensor([1]),), {})
    assert pipeline.parts[0]((), inputs, True).shape == (1, 2)
