"""What stands in the way: sparse tensors, `torch.func`, checkpoints, scripts, copies."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ext import DynamicGradientCheckpointing
from lightning_ext._compat import pl
from tests.lightning_ext.test_gradient_checkpointing import Module, batches, fit, same

WIDTH = 16


def rows() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Graph(nn.Module):
    """Takes a sparse matrix, from its caller or from a buffer."""

    def __init__(self, given: bool, layout: torch.layout = torch.sparse_coo) -> None:
        super().__init__()
        self.linear, self.given = mlp(), given
        own = torch.eye(8).to_sparse(layout=layout) * 0.9
        self.register_buffer("own", own, persistent=False)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        matrix = other if self.given else self.own
        return torch.relu(torch.sparse.mm(matrix, self.linear(x)))


class Graphs(nn.Module):
    def __init__(self, given: bool, layout: torch.layout = torch.sparse_coo) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Graph(given, layout) for _ in range(4))
        self.last, self.given, self.layout = nn.Linear(WIDTH, 3), given, layout

    def forward(self, x: Tensor) -> Tensor:
        matrix = torch.eye(8).to_sparse(layout=self.layout) * 1.1
        for block in self.blocks:
            x = block(x, matrix) if self.given else block(x)
        out: Tensor = self.last(x)
        return out


class Inner(nn.Module):
    """Uses its layers inside of something of torch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.mlp, self.way = mlp(), way

    def forward(self, x: Tensor) -> Tensor:
        out: Any
        if self.way == "gradient":
            out = torch.func.grad(lambda t: self.mlp(t).square().sum())(x)
        elif self.way == "slope":
            out = torch.autograd.grad(self.mlp(x).square().sum(), x, create_graph=True)[0]
        elif self.way == "tangent":
            out = torch.func.jvp(self.mlp, (x,), (torch.ones_like(x),))[1]
        elif self.way == "vmap":
            out = torch.func.vmap(self.mlp)(x)
        elif self.way == "on CPU":
            with torch.autograd.graph.save_on_cpu():
                out = self.mlp(x)
        else:
            out = checkpoint(self.mlp, x, use_reentrant=self.way == "reentrant")
        return x + 0.1 * out


class Around(nn.Module):
    """Blocks and other code inside of a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(mlp() for _ in range(4)), reentrant
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(lambda x, b=block: x * b(x.sin()), x, use_reentrant=self.reentrant)
        out: Tensor = self.last(x)
        return out


def stack(block: Callable[[], nn.Module]) -> nn.Module:
    blocks = (block() for _ in range(4))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 3))


INNER = ("gradient", "slope", "tangent", "vmap", "on CPU", "reentrant", "checkpoint")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "sparse buffer": lambda: Graphs(False),
    "sparse argument": lambda: Graphs(True),
    "sparse argument, by rows": lambda: Graphs(True, torch.sparse_csr),
    **{way: (lambda way=way: stack(lambda: Inner(way))) for way in INNER},  # type: ignore[misc]
    "around": lambda: Around(False),
    "around, reentrant": lambda: Around(True),
    "scripts": lambda: stack(lambda: nn.Sequential(torch.jit.script(mlp()), nn.Tanh())),
    "recurrent": lambda: stack(lambda: Recurrent()),
}


class Recurrent(nn.Module):
    """Without gradients, torch takes another kernel for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x[None])[0][0]
        return out


@pytest.mark.filterwarnings("ignore:DynamicGradientCheckpointing. left alone")
@pytest.mark.filterwarnings("ignore:DynamicGradientCheckpointing. nothing (can be|is) run again")
@pytest.mark.filterwarnings("ignore:DynamicGradientCheckpointing. memory_budget=")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("blocks", [None, True])
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_plain_run(name: str, blocks: bool | None) -> None:
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(Module(MODELS[name]()))
    plain, module = modules
    network = module.network
    own = network.blocks if hasattr(network, "blocks") else network[1:-1]
    kinds = [type(own[0])] if blocks else None
    callback = DynamicGradientCheckpointing(0.3, blocks=kinds)
    fit(plain, batches(rows(), 4))
    fit(module, batches(rows(), 4), callback)
    assert same(plain, module)
    assert len(module.seen) == 4


@pytest.mark.parametrize("name", ["checkpoint", "reentrant", "around", "around, reentrant"])
def test_checkpoints_of_the_model_itself_are_told(name: str) -> None:
    callback = DynamicGradientCheckpointing(1.0)
    fit(Module(MODELS[name]()), batches(rows(), 1), callback)
    assert callback.report_ is not None
    told = [text for text in callback.report_.advice if "the model itself checkpoints" in text]
    assert len(told) == 1


def test_a_model_that_is_checkpointed_as_a_whole_is_told() -> None:
    callback = DynamicGradientCheckpointing(0.5, blocks=[nn.Sequential])
    with pytest.warns(UserWarning, match="nothing is run again, as its blocks .* run inside of ch"):
        fit(Module(Around(False)), batches(rows(), 5), callback)
    assert callback.report_ is None
    assert [d.action for d in callback.decisions_] == ["fall back"]


def test_blocks_in_transforms_of_the_step() -> None:
    class Penalty(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            slope = torch.func.grad(lambda t: self.network(t).square().mean())(batch[0])
            return loss + slope.square().mean()

    torch.manual_seed(0)
    plain = Penalty(stack(mlp))
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.4)
    fit(plain, batches(rows(), 4))
    fit(module, batches(rows(), 4), callback)
    assert same(plain, module)
    assert callback.plan_ is not None
    assert callback.plan_.extra > 0


class Copies(pl.Callback):
    """Makes copies and files in the middle of a step."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        network = pl_module.network
        file = io.BytesIO()
        torch.save(network, file)
        assert b"lightning_ext" not in file.getvalue()
        file.seek(0)
        self.copies += [copy.deepcopy(network), torch.load(file, weights_only=False)]


def test_copies_in_the_middle_of_a_step() -> None:
    torch.manual_seed(0)
    plain = Module(stack(mlp))
    module, copies = copy.deepcopy(plain), Copies()
    fit(plain, batches(rows(), 4))
    fit(module, batches(rows(), 4), copies, DynamicGradientCheckpointing(0.4))
    assert same(plain, module)
    for found in copies.copies:
        found(rows()).sum().backward()
        assert all(p.grad is not None for p in found.parameters())


def test_the_module_itself_is_copied_in_its_step() -> None:
    class Itself(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append(batch_idx)
            other = copy.deepcopy(self)
            assert other.log.__self__ is other  # type: ignore[attr-defined]
            loss: Tensor = self.network(batch[0]).square().mean()
            return loss

    fit(Itself(stack(mlp)), batches(rows(), 3), DynamicGradientCheckpointing(0.4))
