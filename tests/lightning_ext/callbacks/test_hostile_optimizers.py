"""Optimizers and hooks that do not keep to torch's customs: right rates, or it is said."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_ext._layers import layers_from_module
from lightning_ext._scaled_step import ScaledStep
from tests.lightning_ext.helpers import Module, SpySGD, decay, depth, loader, trainer, weights

LR = 0.1


def expected(name: str, lr: float = LR) -> Any:
    return pytest.approx(lr * 0.5 ** (3 - depth(name)), rel=1e-12)


def sgd(module: nn.Module) -> SpySGD:
    return SpySGD(module.parameters(), lr=LR)


class Parallel(torch.optim.SGD):
    """Keeps a list beside its groups, as AdaBound does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.base_lrs = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        for group, _ in zip(self.param_groups, self.base_lrs, strict=False):
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad
        return loss


class Cached(torch.optim.SGD):
    """Steps through the groups that it was made with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mine = self.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        for group in self.mine:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad
        return loss


def replaced(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    step = torch.optim.SGD.step.__wrapped__
    optimizer.step = lambda closure=None: step(optimizer, closure)
    return optimizer


def test_groups_that_are_passed_over_learn_at_equal_rates() -> None:
    callback = decay(0.5)
    module = Module(lambda m: Parallel(m.parameters(), lr=LR))
    start = weights(module)
    with pytest.warns(UserWarning, match="Parallel passed over some of its parameter groups"):
        trainer(callback, max_steps=2).fit(module, loader())
    assert [d.action for d in callback.decisions_] == ["set rates", "fall back"]
    # The second step makes up for those that the first one passed over.
    assert not any(torch.equal(weight, start[name]) for name, weight in weights(module).items())


@pytest.mark.parametrize("make", [lambda m: Cached(m.parameters(), lr=LR), replaced])
def test_groups_that_nobody_looks_at(make: Any) -> None:
    callback = decay(0.5)
    module, plain = Module(make), Module(make)
    with pytest.warns(UserWarning, match="takes no notice of its param_groups"):
        trainer(callback, max_epochs=4).fit(module, loader())
    assert [d.action for d in callback.decisions_] == ["set rates", "fall back"]
    trainer(max_epochs=4).fit(plain, loader())
    for name, weight in weights(plain).items():
        assert torch.equal(weight, weights(module)[name])


@pytest.mark.parametrize("whole_list", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_parameters_that_are_replaced_keep_their_level(whole_list: bool, first: bool) -> None:
    class Replaces(Callback):
        def on_train_batch_start(self, t: Any, module: Any, batch: Any, index: int) -> None:
            if index != 2:
                return
            old = module.net.embed.weight
            module.net.embed.weight = nn.Parameter(old.detach().clone())
            (group,) = t.optimizers[0].param_groups
            if whole_list:
                group["params"] = list(module.parameters())
            else:
                group["params"][[p is old for p in group["params"]].index(True)] = (
                    module.net.embed.weight
                )

    module, callbacks = Module(sgd), [Replaces(), decay(0.5)]
    t = trainer(*(callbacks if first else callbacks[::-1]), max_epochs=1)
    t.fit(module, loader())
    for name, p in module.net.named_parameters():
        assert t.optimizers[0].rates[-1][id(p)] == expected(name), name


def test_a_pre_hook_of_the_user_s_finds_whole_groups() -> None:
    seen = []

    class Hooks(Callback):
        def on_train_start(self, t: Any, module: Any) -> None:
            def hook(optimizer: Any, *_: Any) -> None:
                seen.append(len(optimizer.param_groups))
                optimizer.param_groups[0]["lr"] = 0.2

            t.optimizers[0].register_step_pre_hook(hook)

    def by_hand(module: Any) -> torch.optim.Optimizer:
        named = module.net.named_parameters()
        return torch.optim.SGD(
            [{"params": [p], "lr": 0.2 * 0.5 ** (3 - depth(n))} for n, p in named]
        )

    module, twin = Module(lambda m: torch.optim.SGD(m.parameters(), lr=LR)), Module(by_hand)
    trainer(decay(0.5), Hooks(), max_epochs=1).fit(module, loader())
    trainer(max_epochs=1).fit(twin, loader())
    assert set(seen) == {1}
    for name, weight in weights(twin).items():
        assert torch.equal(weight, weights(module)[name]), name


def test_a_tensor_in_a_group_stays_the_user_s_own() -> None:
    gain = torch.tensor(1.0)

    class Gain(SpySGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            self.gains = [float(group["gain"]) for group in self.param_groups]
            return loss

    class Doubles(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            gain.mul_(2)

    t = trainer(decay(0.5), Doubles(), max_steps=3)
    t.fit(Module(lambda m: Gain([{"params": list(m.parameters()), "gain": gain}], lr=LR)), loader())
    assert set(t.optimizers[0].gains) == {4.0}
    assert t.optimizers[0].param_groups[0]["gain"] is gain
    assert gain == 8


def test_a_counter_that_the_optimizer_advances_in_place_is_advanced_once_a_step() -> None:
    class Counts(SpySGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for group in self.param_groups:
                group["count"] += 1
            return loss

    count = torch.tensor(0)
    t = trainer(decay(0.5), max_steps=3)
    t.fit(
        Module(lambda m: Counts([{"params": list(m.parameters()), "count": count}], lr=LR)),
        loader(),
    )
    assert t.optimizers[0].param_groups[0]["count"] == 3


class OnlyRates(torch.optim.SGD):
    """Takes from its groups nothing but the rate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lists = [group["params"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        for params, group in zip(self.lists, self.param_groups, strict=False):
            for p in params:
                if p.grad is not None:
                    p -= group["lr"] * p.grad
        return loss


def test_equal_rates_are_the_user_s_and_stay_so_after_a_resume(tmp_path: Path) -> None:
    module = Module(lambda m: OnlyRates(m.parameters(), lr=LR))
    logger, monitor = CSVLogger(tmp_path), LearningRateMonitor()
    callback = decay(0.5)
    first = trainer(callback, monitor, logger=logger, max_epochs=5, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="takes no notice of its param_groups"):
        first.fit(module, loader())
    first.save_checkpoint(path := tmp_path / "last.ckpt")
    start, restored = weights(module), decay(0.5)
    again = trainer(restored, max_epochs=-1, max_steps=first.global_step + 1)
    again.fit(module, loader(), ckpt_path=path)
    assert [d.action for d in restored.decisions_] == ["set rates", "fall back"]
    plain = Module(lambda m: OnlyRates(m.parameters(), lr=LR))
    plain.load_state_dict(start)
    trainer(max_steps=1).fit(plain, loader())
    assert all(torch.equal(weights(module)[n], w) for n, w in weights(plain).items())


@pytest.mark.parametrize("warmed_up", [0, 1])
def test_a_group_at_rate_0_that_is_skipped_is_no_reason_to_fall_back(warmed_up: int) -> None:
    class SkipsZero(SpySGD):
        def step(self, closure: Any = None) -> Any:
            groups = self.param_groups
            used = [dict.get(group, "lr") != 0 for group in groups]
            self.param_groups = [group for group, use in zip(groups, used, strict=True) if use]
            try:
                return super().step(closure)
            finally:
                self.param_groups = groups

    def make(module: Any) -> Any:
        halves = [list(module.net.embed.parameters()), list(module.net.blocks.parameters())]
        rates = [LR, LR]
        rates[warmed_up] = 0.0
        return SkipsZero(
            [{"params": ps, "lr": rate} for ps, rate in zip(halves, rates, strict=True)], lr=LR
        )

    callback = decay(0.5)
    trainer(callback, max_epochs=5).fit(Module(make), loader())
    assert [d.action for d in callback.decisions_] == ["set rates"]


class Lookahead(torch.optim.Optimizer):
    """Without `super().__init__`, as many are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, {}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def test_a_wrapper_that_cannot_be_hooked() -> None:
    module = Module(lambda m: Lookahead(sgd(m)))
    t = trainer(decay(0.5), max_epochs=1)
    t.fit(module, loader())
    for name, p in module.net.named_parameters():
        assert t.optimizers[0].inner.rates[-1][id(p)] == expected(name), name


class Unhooked(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        self.param_groups, self.state, self.defaults = [{"params": params, "lr": LR}], {}, {}

    def step(self, closure: Any = None) -> Any: ...


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda ps: Unhooked(ps), TypeError, r"Unhooked cannot be hooked; call super\(\)"),
        (
            lambda ps: torch.optim.Optimizer([{"params": ps, "lr": None}], {}),
            ValueError,
            r"without a learning rate \(lr=None\).*relative_step=False",
        ),
        (lambda ps: torch.optim.Optimizer(ps, {}), ValueError, "without a learning rate"),
    ],
)
def test_refused_before_the_first_batch(make: Any, error: type, message: str) -> None:
    t = trainer(decay(0.5))
    with pytest.raises(error, match=message):
        t.fit(Module(lambda m: make(list(m.parameters()))), loader())
    assert t.global_step == 0


def test_a_checkpoint_made_while_the_optimizer_steps_holds_the_user_s_groups() -> None:
    saved = []

    class Saves(SpySGD):
        def step(self, closure: Any = None) -> Any:
            saved.append(len(self.state_dict()["param_groups"]))  # a signal handler does so
            return super().step(closure)

    module = Module(lambda m: Saves(m.parameters(), lr=LR))
    t = trainer(decay(0.5), max_epochs=1)
    t.fit(module, loader())
    assert set(saved) == {1}
    assert set(t.optimizers[0].copies) == {4}
    for name, p in module.net.named_parameters():
        assert t.optimizers[0].rates[-1][id(p)] == expected(name), name


def test_a_checkpoint_made_within_the_closure() -> None:
    class SavesBeforeStep(Callback):
        def on_before_optimizer_step(self, t: Any, module: Any, optimizer: Any) -> None:
            assert len(optimizer.state_dict()["param_groups"]) == 1
            assert len(optimizer.param_groups) == 1

    module = Module(sgd)
    t = trainer(decay(0.5), SavesBeforeStep(), max_epochs=2)
    t.fit(module, loader())
    for rates in t.optimizers[0].rates:
        for name, p in module.net.named_parameters():
            assert rates[id(p)] == expected(name), name
    assert len(t.optimizers[0].param_groups) == 1


def test_an_optimizer_of_a_fit_that_ended_without_a_hook_is_freed() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    scaled = ScaledStep(optimizer, {})
    gone = weakref.ref(optimizer)
    del optimizer, scaled
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_zero_redundancy(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.optim import ZeroRedundancyOptimizer

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        module = Module(
            lambda m: ZeroRedundancyOptimizer(m.parameters(), optimizer_class=SpySGD, lr=LR)
        )
        t = trainer(decay(0.5), max_epochs=1)
        t.fit(module, loader())
        for name, p in module.net.named_parameters():
            assert t.optimizers[0].optim.rates[-1][id(p)] == expected(name), name
    finally:
        distributed.destroy_process_group()


def test_what_an_earlier_fit_left_does_not_stack() -> None:
    net = nn.Linear(2, 1, bias=False)
    optimizer = SpySGD(net.parameters(), lr=LR)
    for _ in range(2):
        scaled = ScaledStep(optimizer, {net.weight: 0.5})
    net.weight.grad = torch.ones_like(net.weight)
    optimizer.step()
    assert optimizer.rates == [{id(net.weight): 0.05}]
    scaled.detach()
    optimizer.step()
    assert optimizer.rates[-1] == {id(net.weight): LR}


def test_biases_by_any_name() -> None:
    lstm = nn.LSTM(2, 3, bidirectional=True)
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    nn.utils.parametrize.register_parametrization(linear, "bias", nn.Identity())
    attention = nn.MultiheadAttention(2, 1, add_bias_kv=True)
    tree = layers_from_module(nn.ModuleList([lstm, linear, attention]))
    biases = {p.name for p in tree.all_parameters() if p.is_bias}
    assert biases == {
        *(f"0.bias_{gate}_l0{way}" for gate in ("ih", "hh") for way in ("", "_reverse")),
        "1.parametrizations.bias.original",
        "2.in_proj_bias",
        "2.out_proj.bias",
        "2.bias_k",
        "2.bias_v",
    }
