"""Runs that go astray, optimizers of unusual make: rates stay right, or it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks as plc
from torch import nn

from lightning_ext import LayerwiseLRDecay
from tests.lightning_ext.helpers import (
    Module,
    Net,
    SpySGD,
    ValidatedModule,
    decay,
    depth,
    loader,
    trainer,
    weights,
)


def spy(module: Any) -> SpySGD:
    return SpySGD([p for p in module.parameters() if p.requires_grad], lr=0.1)


def rate(optimizer: Any, parameter: Any, step: int = -1) -> float:
    return optimizer.rates[step][id(parameter)]


class Accumulating(torch.optim.SGD):
    """Sums its rate in a group entry, so that each copy of a group keeps a sum of its own."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["sum"] = group.get("sum", 0.0) + group["lr"]
        return loss


def test_a_test_from_a_checkpoint_leaves_no_state_for_the_next_fit(tmp_path: Path) -> None:
    callback = decay(0.5)
    module = ValidatedModule(lambda m: Accumulating(m.parameters(), lr=0.1))
    t = trainer(callback)
    t.fit(module, loader(), loader())
    t.save_checkpoint(path := str(tmp_path / "done.ckpt"))
    t.test(module, loader(), ckpt_path=path, verbose=False)
    again = trainer(callback, max_steps=1)
    again.fit(ValidatedModule(lambda m: Accumulating(m.parameters(), lr=0.1)), loader(), loader())
    (groups,) = callback.state_dict()["group_state"]
    sums = sorted(copy["sum"] for copy in groups[0])
    assert sums == pytest.approx([0.1 * 0.5**k for k in (3, 2, 1, 0)], rel=1e-12)
    assert len(callback.decisions_) == 1


class UnfreezeBackbone(plc.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net, optimizer, lr=0.1)


@pytest.mark.parametrize("name", ["classifier", "projection"])
def test_a_backbone_defined_after_its_head_is_counted_once_it_is_trained(name: str) -> None:
    class HeadFirst(Module):
        def __init__(self) -> None:
            super().__init__(spy)
            net = self._modules.pop("net")
            setattr(self, name, nn.Linear(3, 3))
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return nn.functional.cross_entropy(getattr(self, name)(self.net(x)), y)

    module = HeadFirst()
    callback = decay(0.5)
    t = trainer(UnfreezeBackbone(), callback, max_epochs=2)
    t.fit(module, loader())
    never_frozen = decay(0.5)
    fresh = HeadFirst()
    trainer(never_frozen, max_steps=1).fit(fresh, loader())
    assert callback.multipliers_ == never_frozen.multipliers_
    stem = rate(t.optimizers[0], module.net.embed.weight)
    assert stem == pytest.approx(0.1 * never_frozen.multipliers_["net.embed.weight"], rel=1e-12)


class Gan(Module):
    def __init__(self) -> None:
        super().__init__(lambda m: [SpySGD(n.parameters(), lr=0.1) for n in (m.net, m.critic)])
        self.critic = Net()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer, net in zip(self.optimizers(), (self.net, self.critic), strict=True):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(net(x), y))
            optimizer.step()


def test_the_user_s_levels_name_the_whole_module() -> None:
    module = Gan()
    callback = decay(0.5, groups=lambda n: 1 if "head" in n else 0)
    trainer(callback).fit(module, loader())
    patterns = decay(0.5, groups=["*embed*", "*blocks*"])
    t = trainer(patterns)
    t.fit(module, loader())
    for optimizer, net in zip(t.optimizers, (module.net, module.critic), strict=True):
        assert rate(optimizer, net.embed.weight) == pytest.approx(0.025, rel=1e-12)
    assert callback.multipliers_["critic.head.weight"] == 1.0


def test_a_closure_that_raises_once_costs_no_scaling() -> None:
    class Retries(Module):
        failed = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and not self.failed:
                self.failed = True
                raise torch.OutOfMemoryError("first try")
            return super().training_step(batch, batch_idx)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            try:
                optimizer.step(closure=closure)
            except torch.OutOfMemoryError:
                assert len(optimizer.param_groups) == 1
                optimizer.step(closure=closure)

    module = Retries(spy)
    t = trainer(decay(0.5))
    t.fit(module, loader())
    assert module.failed
    stem = {rate(t.optimizers[0], module.net.embed.weight, i) for i in range(12)}
    assert stem == {0.1 * 0.5**3}


def test_state_per_group_survives_an_exception_inside_the_step(tmp_path: Path) -> None:
    class Fails(Accumulating):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            self.calls += 1
            if self.calls == 4:
                raise RuntimeError("boom")
            return loss

    callback = decay(0.5)
    module = Module(lambda m: Fails(m.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="boom"):
        trainer(callback).fit(module, loader())
    ((copies,),) = callback.state_dict()["group_state"]
    assert sorted(c["sum"] for c in copies) == pytest.approx([0.05, 0.1, 0.2, 0.4], rel=1e-12)


@pytest.mark.parametrize("subclass", [False, True])
def test_two_in_one_trainer_are_refused(subclass: bool) -> None:
    class Other(LayerwiseLRDecay):
        pass

    if subclass:
        with pytest.raises(ValueError, match=r"two LayerwiseLRDecay.*groups="):
            trainer(decay(0.5), Other(0.9)).fit(Module(spy), loader())
    else:
        with pytest.raises((ValueError, RuntimeError), match="LayerwiseLRDecay"):
            trainer(decay(0.5), decay(0.9)).fit(Module(spy), loader())


class Composite(torch.optim.Optimizer):
    """Two optimizers in one, as those that pair Muon with AdamW."""

    def __init__(self, first: Any, second: Any, in_list: bool) -> None:
        self.parts = [first, second] if in_list else {"a": first, "b": second}
        super().__init__([*first.param_groups, *second.param_groups], {})
        self.param_groups = [*first.param_groups, *second.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for part in self.parts if isinstance(self.parts, list) else self.parts.values():
            part.step()
        return loss


@pytest.mark.parametrize("in_list", [True, False])
def test_every_part_of_a_composite_optimizer_is_scaled(in_list: bool) -> None:
    def make(module: Any) -> Any:
        matrices = SpySGD([p for p in module.parameters() if p.ndim == 2], lr=0.1)
        vectors = SpySGD([p for p in module.parameters() if p.ndim < 2], lr=0.2)
        made.extend([matrices, vectors])
        return Composite(matrices, vectors, in_list)

    made: list[SpySGD] = []
    module = Module(make)
    trainer(decay(0.5)).fit(module, loader())
    for optimizer, base in zip(made, (0.1, 0.2), strict=True):
        for name, p in module.named_parameters():
            if id(p) in optimizer.rates[-1]:
                assert rate(optimizer, p) == pytest.approx(base * 0.5 ** (3 - depth(name)))
        assert len(optimizer.param_groups) == 1


def test_sam_evaluates_its_closure_at_the_perturbed_weights() -> None:
    class Sam(torch.optim.Optimizer):
        def __init__(self, base: SpySGD) -> None:
            super().__init__(base.param_groups, {})
            self.base = base
            self.param_groups = base.param_groups

        def step(self, closure: Any = None) -> Any:
            first = closure()
            moved = [(p, p.grad.sign().mul(0.05)) for g in self.param_groups for p in g["params"]]
            with torch.no_grad():
                for p, by in moved:
                    p.add_(by)
            losses.append((float(first), float(closure())))
            with torch.no_grad():
                for p, by in moved:
                    p.sub_(by)
            self.base.step()
            return first

    losses: list[tuple[float, float]] = []
    module = Module(lambda m: Sam(spy(m)))
    t = trainer(decay(0.5))
    t.fit(module, loader())
    assert all(second > first for first, second in losses)
    assert rate(t.optimizers[0].base, module.net.embed.weight) == pytest.approx(0.0125, rel=1e-12)


def test_optimizers_made_anew_mid_run_are_scaled_too() -> None:
    class Renews(plc.Callback):
        def on_train_epoch_start(self, t: Any, module: Any) -> None:
            if t.current_epoch == 1:
                t.strategy.setup_optimizers(t)

    module = Module(spy)
    t = trainer(Renews(), decay(0.5))
    t.fit(module, loader())
    assert len(t.optimizers[0].rates) == 6
    assert rate(t.optimizers[0], module.net.embed.weight) == pytest.approx(0.0125, rel=1e-12)


def test_a_tensor_counter_in_the_group_advances_once_per_step() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for group in self.param_groups:
                group.setdefault("count", torch.zeros(()))
                group["count"] += 1
            return loss

    def make(module: Any) -> Any:
        optimizer = Counting(module.parameters(), lr=0.1)
        optimizer.param_groups[0]["count"] = torch.zeros(())
        return optimizer

    t = trainer(decay(0.5))
    t.fit(Module(make), loader())
    assert float(t.optimizers[0].param_groups[0]["count"]) == 12


def test_the_user_s_own_step_hooks_see_whole_groups() -> None:
    def make(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    t = trainer(decay(0.5), max_steps=3)
    t.fit(Module(make), loader())
    assert t.optimizers[0].param_groups[0]["lr"] == 0.125


def test_a_parameter_outside_the_module_is_said() -> None:
    outside = nn.Parameter(torch.ones(3))
    make = lambda m: torch.optim.SGD([*m.parameters(), outside], lr=0.1)  # noqa: E731
    with pytest.warns(UserWarning, match="not in Module; they learn at the full rate"):
        trainer(decay(0.5)).fit(Module(make), loader())


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam"])
def test_optimizers_with_one_step_size_are_refused(name: str) -> None:
    kind = type(name, (torch.optim.SGD,), {})
    with pytest.raises(ValueError, match=f"{name} takes one step size.*AdamW"):
        trainer(decay(0.5)).fit(Module(lambda m: kind(m.parameters(), lr=1.0)), loader())


def test_each_user_group_s_rates_are_logged(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    def make(module: Any) -> Any:
        head = list(module.net.head.parameters())
        rest = [p for n, p in module.named_parameters() if "head" not in n]
        return torch.optim.SGD([{"params": rest}, {"params": head, "lr": 1.0}], lr=0.1)

    logger = CSVLogger(tmp_path)
    monitor = plc.LearningRateMonitor("epoch")
    t = trainer(decay(0.5), monitor, logger=logger, max_epochs=1, log_every_n_steps=1)
    t.fit(Module(make), loader())
    logger.save()
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    header = lines[0].split(",")
    row = next(
        line for line in lines[1:] if line.split(",")[header.index("lr-layerwise/pg2/level_3")]
    )
    values = dict(zip(header, row.split(","), strict=True))
    assert float(values["lr-layerwise/pg2/level_3"]) == 1.0
    assert float(values["lr-layerwise/pg1/level_0"]) == 0.0125
    assert weights(t.lightning_module)  # trained to the end
