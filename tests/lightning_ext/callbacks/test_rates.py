"""The ratio between layers is exact under every scheduler, optimizer and loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import lr_scheduler as S

from tests.lightning_ext.helpers import (
    LEVELS,
    Module,
    Net,
    SpySGD,
    decay,
    depth,
    loader,
    trainer,
    weights,
)

MATRIX = pytest.mark.matrix
STEPS = 12  # two epochs of six batches


def per_step(scheduler: Any) -> dict[str, Any]:
    return {"scheduler": scheduler, "interval": "step"}


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda o: None,
    "cosine": lambda o: per_step(S.CosineAnnealingLR(o, STEPS, eta_min=0.03)),
    "cosine_per_epoch": lambda o: S.CosineAnnealingLR(o, 2, eta_min=0.03),
    "warm_restarts": lambda o: per_step(S.CosineAnnealingWarmRestarts(o, 5, eta_min=0.01)),
    "one_cycle": lambda o: per_step(S.OneCycleLR(o, 0.3, total_steps=STEPS)),
    "cyclic": lambda o: per_step(S.CyclicLR(o, 0.01, 0.2, step_size_up=4)),
    "lambda": lambda o: per_step(S.LambdaLR(o, lambda step: 1 / (1 + step))),
    "step": lambda o: per_step(S.StepLR(o, 3)),
    "exponential": lambda o: S.ExponentialLR(o, 0.5),
    "polynomial": lambda o: per_step(S.PolynomialLR(o, STEPS, power=2.0)),
    "warm_up": lambda o: per_step(S.LinearLR(o, 0.1, total_iters=5)),
    "sequential": lambda o: per_step(
        S.SequentialLR(
            o, [S.LinearLR(o, 0.1, total_iters=4), S.CosineAnnealingLR(o, 8, eta_min=1e-3)], [4]
        )
    ),
    "chained": lambda o: per_step(
        S.ChainedScheduler([S.ConstantLR(o, 0.5, 3), S.ExponentialLR(o, 0.9)])
    ),
    "swa": lambda o: per_step(torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=6)),
    "plateau": lambda o: {
        # min_lr and eps bind after the first cut: what distorts permanently split groups.
        "scheduler": S.ReduceLROnPlateau(o, factor=0.1, patience=0, min_lr=0.02, eps=0.01),
        "monitor": "loss",
        "interval": "step",
    },
}


def with_scheduler(name: str, spies: list[SpySGD], **options: Any) -> Any:
    def make(module: LightningModule) -> Any:
        optimizer = SpySGD(module.parameters(), lr=0.1, momentum=0.9, **options)
        spies.append(optimizer)
        scheduler = SCHEDULERS[name](optimizer)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    return make


@pytest.mark.parametrize("name", SCHEDULERS)
def test_ratios_exact_at_every_step(name: str) -> None:
    spies: list[SpySGD] = []
    module = Module(with_scheduler(name, spies))
    trainer(decay(0.7)).fit(module, loader())
    (spy,) = spies
    assert len(spy.rates) == STEPS
    for rates in spy.rates:
        head = rates[id(module.net.head.weight)]
        for parameter_name, parameter in module.named_parameters():
            ratio = rates[id(parameter)] / head
            assert ratio == pytest.approx(0.7 ** (3 - depth(parameter_name)), rel=1e-12)


@pytest.mark.parametrize("name", [n for n in SCHEDULERS if n != "plateau"])
def test_the_head_learns_at_the_scheduler_s_own_rate(name: str) -> None:
    """As in a run without the callback: schedulers never see the split groups."""
    heads = []
    for callbacks in ([], [decay(0.7)]):
        spies: list[SpySGD] = []
        module = Module(with_scheduler(name, spies))
        trainer(*callbacks).fit(module, loader())
        heads.append([rates[id(module.net.head.weight)] for rates in spies[0].rates])
    assert heads[0] == heads[1]
    assert name == "none" or len(set(heads[0])) > 1


def by_hand(module: LightningModule, optimizer: type, decay_: float, **options: Any) -> Any:
    """The same optimizer with one permanent group per level."""
    lr = options.pop("lr")
    groups = [
        {
            "params": [p for n, p in module.named_parameters() if depth(n) == d],
            "lr": lr * decay_ ** (LEVELS - 1 - d),
        }
        for d in range(LEVELS)
    ]
    return optimizer(groups, lr=lr, **options)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.1)),
    "nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "adam": (torch.optim.Adam, dict(lr=0.01, weight_decay=0.1)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01, weight_decay=0.3)),
    "adamw_foreach": (torch.optim.AdamW, dict(lr=0.01, weight_decay=0.3, foreach=True)),
    "adamw_fused": (torch.optim.AdamW, dict(lr=0.01, weight_decay=0.3, fused=True)),
    "amsgrad": (torch.optim.AdamW, dict(lr=0.01, amsgrad=True)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.01, momentum=0.5)),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.05)),
    "nadam": (torch.optim.NAdam, dict(lr=0.01)),
    "radam": (torch.optim.RAdam, dict(lr=0.01)),
    "adamax": (torch.optim.Adamax, dict(lr=0.01)),
    "rprop": (torch.optim.Rprop, dict(lr=0.01)),
    "adadelta": (torch.optim.Adadelta, dict(lr=1.0)),
    "asgd": (torch.optim.ASGD, dict(lr=0.01)),
}
LOOPS = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 2},
    "clip": {"gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
    "double": {"precision": "64-true"},
}


def optimizer_and_loop() -> list[Any]:
    """Each optimizer in a plain loop, AdamW in each; the rest of the product in the matrix."""
    return [
        pytest.param(name, loop, marks=[] if loop == "plain" or name == "adamw" else MATRIX)
        for name in OPTIMIZERS
        for loop in LOOPS
    ]


@pytest.mark.parametrize(("name", "loop"), optimizer_and_loop())
def test_weights_equal_permanently_split_groups(name: str, loop: str) -> None:
    kind, options = OPTIMIZERS[name]
    data = loader(dtype=torch.float64 if loop == "double" else torch.float32)
    ours = Module(lambda m: kind(m.parameters(), **options))
    trainer(decay(0.6), **LOOPS[loop]).fit(ours, data)
    reference = Module(lambda m: by_hand(m, kind, 0.6, **options))
    trainer(**LOOPS[loop]).fit(reference, data)
    plain = Module(lambda m: kind(m.parameters(), **options))
    trainer(**LOOPS[loop]).fit(plain, data)
    expected, without = weights(reference), weights(plain)
    for parameter_name, value in weights(ours).items():
        assert torch.equal(value, expected[parameter_name]), parameter_name
    assert not torch.equal(without["net.embed.weight"], expected["net.embed.weight"])


def test_a_plain_sgd_step_moves_by_factor_times_rate_times_gradient() -> None:
    module = Module(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    before = weights(module)
    x, y = next(iter(loader()))
    gradients = torch.autograd.grad(
        nn.functional.cross_entropy(module.net(x), y), list(module.parameters())
    )
    trainer(decay(0.5), max_steps=1).fit(module, loader())
    for (name, after), gradient in zip(module.named_parameters(), gradients, strict=True):
        expected = before[name].add(gradient, alpha=-(0.1 * 0.5 ** (3 - depth(name))))
        assert torch.equal(after, expected), name


def test_user_groups_keep_their_rates_and_weight_decay() -> None:
    def make(module: Any) -> Any:
        head = list(module.net.head.parameters())
        rest = [p for n, p in module.named_parameters() if "head" not in n]
        groups = [{"params": rest, "weight_decay": 0.3}, {"params": head, "lr": 1.0}]
        return SpySGD(groups, lr=0.1, weight_decay=0.0)

    module = Module(make)
    t = trainer(decay(0.5))
    t.fit(module, loader())
    (spy,) = t.optimizers
    for name, p in module.named_parameters():
        base = 1.0 if "head" in name else 0.1
        assert spy.rates[-1][id(p)] == pytest.approx(base * 0.5 ** (3 - depth(name)), rel=1e-12)
        assert spy.decays[-1][id(p)] == (0.0 if "head" in name else 0.3)
    assert [g["lr"] for g in spy.param_groups] == [0.1, 1.0]
    assert spy.copies[-1] == 5  # rest: embed, two blocks, norm; head: one


def test_no_decay_on_bias_and_norm() -> None:
    module = Module(lambda m: SpySGD(m.parameters(), lr=0.1, weight_decay=0.3))
    t = trainer(decay(0.5, no_decay_on_bias_and_norm=True))
    t.fit(module, loader())
    (spy,) = t.optimizers
    for name, p in module.named_parameters():
        exempt = name.endswith("bias") or "norm" in name
        assert spy.decays[-1][id(p)] == (0.0 if exempt else 0.3), name
        assert spy.rates[-1][id(p)] == pytest.approx(0.1 * 0.5 ** (3 - depth(name)), rel=1e-12)
    assert spy.copies[-1] == 2 * LEVELS
    assert spy.param_groups[0]["weight_decay"] == 0.3


@pytest.mark.parametrize(
    "parts",
    [[["net"], ["critic"]], [["net", "net_back"], ["critic", "critic_back"]]],
    ids=["GAN", "CycleGAN"],
)
def test_manual_optimization_with_two_optimizers_counts_each_network(
    parts: list[list[str]],
) -> None:
    def make(module: Any) -> list[torch.optim.Optimizer]:
        return [
            SpySGD([p for name in names for p in getattr(module, name).parameters()], lr=0.1)
            for names in parts
        ]

    class Gan(Module):
        def __init__(self) -> None:
            super().__init__(make)
            for name in [name for names in parts for name in names if name != "net"]:
                setattr(self, name, Net())
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            for optimizer, names in zip(self.optimizers(), parts, strict=True):
                optimizer.zero_grad()
                out = sum(getattr(self, name)(x) for name in names)
                self.manual_backward(nn.functional.cross_entropy(out, y))
                optimizer.step()

    module = Gan()
    t = trainer(decay(0.5))
    t.fit(module, loader())
    for spy, names in zip(t.optimizers, parts, strict=True):
        assert len(spy.rates) == STEPS
        for net in (getattr(module, name) for name in names):
            for name, p in net.named_parameters():
                expected = 0.1 * 0.5 ** (3 - depth(name))
                assert spy.rates[-1][id(p)] == pytest.approx(expected, rel=1e-12)


def test_optimizers_sharing_one_network_count_the_whole() -> None:
    def make(module: Any) -> Any:
        matrices = [p for p in module.parameters() if p.ndim == 2]
        vectors = [p for p in module.parameters() if p.ndim < 2]
        return [SpySGD(matrices, lr=0.1), SpySGD(vectors, lr=0.2)]

    class Both(Module):
        def __init__(self) -> None:
            super().__init__(make)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            first.step()
            second.step()

    module = Both()
    t = trainer(decay(0.5))
    t.fit(module, loader())
    for spy, base in zip(t.optimizers, (0.1, 0.2), strict=True):
        for name, p in module.named_parameters():
            if id(p) in spy.rates[-1]:
                expected = base * 0.5 ** (3 - depth(name))
                assert spy.rates[-1][id(p)] == pytest.approx(expected, rel=1e-12)
