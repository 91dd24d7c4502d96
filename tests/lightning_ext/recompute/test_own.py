"""Blocks that read what their own forward pass writes: weights are those of the plain run."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from lightning_ext import DynamicGradientCheckpointing
from tests.lightning_ext.test_gradient_checkpointing import Module, batches, fit, same

WIDTH = 16


def rows() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


class Running(nn.Module):
    """A running mean that is used at once, written in place or replaced."""

    def __init__(self, replaced: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.replaced = nn.Linear(WIDTH, WIDTH), replaced
        self.register_buffer("mean", torch.zeros(width, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        new = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.replaced:
            self.mean = new
        else:
            self.mean.copy_(new)
        return torch.tanh(self.linear(x - self.mean[0]))


class Counts(nn.Module):
    """A number, a list and a tensor that is no buffer, all of which decide what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.seen, self.total = list[float](), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(0.1)
        self.total += 0.1
        return torch.tanh(self.linear(x)) * (1 + 0.1 * self.calls + sum(self.seen) + self.total)


class Codebook(nn.Module):
    """Learns its codes by itself; too large to be copied at each call."""

    def __init__(self, unseen: bool = False) -> None:
        super().__init__()
        self.unseen = unseen
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(2**11, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        z = self.before(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        codes = self.codes[nearest]
        new = self.codes.index_add(0, nearest, 0.1 * (z.detach() - codes))
        (self.codes.data if self.unseen else self.codes).copy_(new)
        out: Tensor = self.after(torch.tanh(z + (codes - z).detach()))
        return out


def spectral(make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(make(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


class Keeps(nn.Module):
    """Keeps a tensor, with its graph, for those who look at it later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2**12), nn.Tanh(), nn.Linear(2**12, WIDTH))
        self.features: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.inner[1](self.inner[0](x))
        self.features.retain_grad()
        out: Tensor = x + self.inner[2](self.features)
        return out


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "running mean": Running,
    "running mean, replaced": lambda: Running(True),
    "running mean, large": lambda: Running(width=2**11),
    "counters": Counts,
    "codebook": Codebook,
    "codebook, unseen": lambda: Codebook(True),
    "spectral norm": lambda: spectral(parametrizations.spectral_norm),
    "spectral norm, old": lambda: spectral(spectral_norm),
    "keeps a tensor": Keeps,
}


def stack(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    blocks = (make() for _ in range(5))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 3))


@pytest.mark.filterwarnings("ignore:DynamicGradientCheckpointing. left alone")
@pytest.mark.filterwarnings("ignore:DynamicGradientCheckpointing. memory_budget=")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
@pytest.mark.parametrize("budget", ["auto", 0.4])
@pytest.mark.parametrize("name", BLOCKS)
def test_weights_are_those_of_the_plain_run(name: str, budget: float | str) -> None:
    kinds = None if "spectral" in name else [type(BLOCKS[name]())]
    plain, module = Module(stack(BLOCKS[name])), Module(stack(BLOCKS[name]))
    callback = DynamicGradientCheckpointing(budget, blocks=kinds)
    fit(plain, batches(rows(), 6))
    fit(module, batches(rows(), 6), callback)
    assert same(plain, module)
    assert len(module.seen) == 6  # no step was run twice
    alone = name in ("running mean, large", "codebook", "codebook, unseen")
    assert callback.decisions_[0].action == ("exclude" if alone else "plan")
    assert {d.action for d in callback.decisions_[1:]} <= {"tighten"}
    assert (callback.plan_ is None) == alone
    assert callback.plan_ is None or bool(callback.plan_.extra) == (budget == 0.4)


def test_blocks_that_do_not_come_out_the_same_are_left_alone_and_told() -> None:
    class Odd(nn.Module):
        """Draws from generators that are not torch's."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) * random.random() + float(np.random.rand())
            return out

    plain = Module(nn.Sequential(*(Odd() if i == 2 else Running() for i in range(5))))
    module = copy.deepcopy(plain)
    callback = DynamicGradientCheckpointing(0.6, blocks=[Odd, Running])
    random.seed(1)
    np.random.seed(1)
    fit(plain, batches(rows(), 6))
    random.seed(1)
    np.random.seed(1)
    told = "left alone: network.2, as it draws from Python's random numbers"
    with pytest.warns(UserWarning, match=told):
        fit(module, batches(rows(), 6), callback)
    assert same(plain, module)
    assert [d.action for d in callback.decisions_] == ["exclude", "plan"]
    assert callback.report_ is not None
    assert callback.report_.plan.extra > 0
    assert "network.2 is not run again" in callback.report_.advice[0]


@pytest.mark.parametrize("which", ["python", "numpy", "torch", "own"])
def test_draws_that_come_out_alike_by_chance(which: str) -> None:
    class Drops(nn.Module):
        """Leaves out a layer one time in fifty, as stochastic depth does."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.draw = nn.Linear(WIDTH, WIDTH), random.Random(1)
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, x: Tensor) -> Tensor:
            drawn = {
                "python": random.random,
                "numpy": np.random.rand,
                "torch": lambda: torch.rand((), generator=self.generator),
                "own": self.draw.random,
            }[which]()
            out: Tensor = x + torch.tanh(self.inner(x)) if drawn > 0.02 else x
            return out

    plain = Module(nn.Sequential(*(Drops() if i % 2 else Running() for i in range(6))))
    module = copy.deepcopy(plain)
    random.seed(2)
    np.random.seed(2)
    fit(plain, batches(rows(), 30))
    random.seed(2)
    np.random.seed(2)
    with pytest.warns(UserWarning, match=r"left alone: network.1, as it draws from \w+"):
        fit(module, batches(rows(), 30), DynamicGradientCheckpointing(0.8, blocks=[Drops, Running]))
    assert same(plain, module)


def test_what_blocks_note_is_noted_once() -> None:
    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.means = nn.Linear(WIDTH, WIDTH), list[Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.inner(x))
            self.means.append(y.detach().mean())
            return x + y

    module = Module(stack(Notes))
    fit(module, batches(rows(), 6), DynamicGradientCheckpointing(0.4, blocks=[Notes]))
    assert [len(m.means) for m in module.modules() if isinstance(m, Notes)] == [6] * 5


def test_gradients_of_tensors_that_are_kept() -> None:
    class Looks(Module):
        def on_after_backward(self) -> None:
            kept = [m.features for m in self.modules() if isinstance(m, Keeps)]
            self.sizes = [f.grad.norm() for f in kept if f is not None and f.grad is not None]

    plain, module = Looks(stack(Keeps)), Looks(stack(Keeps))
    fit(plain, batches(rows(), 4))
    fit(module, batches(rows(), 4), DynamicGradientCheckpointing(0.6, blocks=[Keeps]))
    assert module.sizes == plain.sizes
    assert len(plain.sizes) == 5


def test_other_parameters_for_a_call() -> None:
    class Fast(Module):
        """A step of gradient descent, whose result is used as parameters."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            named = dict(self.network.named_parameters())
            loss = self.network(batch[0]).square().mean()
            slopes = torch.autograd.grad(loss, [*named.values()], create_graph=True)
            fast = {n: p - 0.5 * g for (n, p), g in zip(named.items(), slopes, strict=True)}
            out = torch.func.functional_call(self.network, fast, (batch[0],))
            found: Tensor = (out - 0.3).square().mean()
            return found

    def network() -> nn.Module:
        return stack(lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)))

    for budget in ("auto", 0.6, 0.5):
        plain, module = Fast(network()), Fast(network())
        fit(plain, batches(rows(), 4))
        callback = DynamicGradientCheckpointing(budget)
        fit(module, batches(rows(), 4), callback)
        assert same(plain, module)
        assert callback.plan_ is not None
        assert budget == "auto" or callback.plan_.extra > 0


class Between(Module):
    """Changes what its blocks depend on between forward and backward pass."""

    def change(self, batch_idx: int) -> None:
        for m in self.modules():
            if isinstance(m, Running):
                m.mean.mul_(0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.change(batch_idx)
        return loss


class Reads(Running):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x - (self.mean[0] + 0.1)))


def reading(width: int, kind: type[Between]) -> Between:
    module = kind(stack(lambda: Reads(width=width)))
    for m in module.modules():
        if isinstance(m, Reads):
            nn.init.ones_(m.mean)
    return module


@pytest.mark.parametrize("width", [WIDTH, 2**11])
def test_buffers_that_change_before_the_backward_pass(width: int) -> None:
    plain, module = reading(width, Between), reading(width, Between)
    fit(plain, batches(rows(), 6))
    callback = DynamicGradientCheckpointing(0.6, blocks=[Reads])
    if width == WIDTH:  # small ones are kept for each call
        fit(module, batches(rows(), 6), callback)
        assert [d.action for d in callback.decisions_] == ["plan"]
    else:
        with pytest.warns(UserWarning, match="left alone: network.*, as mean has changed"):
            fit(module, batches(rows(), 6), callback)
        assert {d.action for d in callback.decisions_} == {"exclude"}
        assert len(module.seen) > 6  # the step was run again, without that block
    assert same(plain, module)


def test_large_buffers_that_change_later_are_an_error() -> None:
    class Later(Between):
        def change(self, batch_idx: int) -> None:
            if batch_idx > 2:
                super().change(batch_idx)

    module = reading(2**11, Later)
    with pytest.raises(RuntimeError, match=r"network.. cannot be run again .* mean has changed"):
        fit(module, batches(rows(), 6), DynamicGradientCheckpointing(0.4, blocks=[Reads]))
