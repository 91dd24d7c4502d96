"""LayerwiseLRDecay in the life of a run: resume, unfreezing, failures, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks as plc
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import lr_scheduler as S

from lightning_ext import LayerwiseLRDecay
from tests.lightning_ext.helpers import (
    Module,
    Net,
    SpySGD,
    decay,
    depth,
    loader,
    trainer,
    weights,
)


def adamw(module: Any) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = S.OneCycleLR(optimizer, 0.05, total_steps=24)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def run(*callbacks: Any, epochs: int, ckpt_path: str | None = None, make: Any = adamw) -> Any:
    module = Module(make)
    t = trainer(*callbacks, max_epochs=epochs)
    t.fit(module, loader(), ckpt_path=ckpt_path)
    return t, module


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(weights(a).items(), weights(b).values(), strict=True):
        assert torch.equal(x, y), name


def test_resume_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    _, straight = run(decay(0.6), epochs=4)
    half, _ = run(decay(0.6), epochs=2)
    half.save_checkpoint(path := str(tmp_path / "half.ckpt"))
    resumed_callback = decay(0.6)
    _, resumed = run(resumed_callback, epochs=4, ckpt_path=path)
    assert_equal(straight, resumed)
    assert len(resumed_callback.decisions_) == 1  # the restored one; nothing new was decided


def test_a_changed_decay_on_resume_is_used_and_said(tmp_path: Path) -> None:
    half, _ = run(decay(0.6), epochs=2)
    half.save_checkpoint(path := str(tmp_path / "half.ckpt"))
    callback = decay(0.9)
    run(callback, epochs=4, ckpt_path=path)
    assert callback.multipliers_["net.embed.weight"] == pytest.approx(0.9**3, rel=1e-12)
    assert [d.step for d in callback.decisions_] == [0, 12]


@pytest.mark.parametrize("first", [True, False], ids=["with_then_without", "without_then_with"])
def test_checkpoints_load_with_and_without_the_callback(tmp_path: Path, first: bool) -> None:
    half, module = run(*([decay(0.6)] if first else []), epochs=2)
    half.save_checkpoint(path := str(tmp_path / "half.ckpt"))
    groups = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert [len(g["params"]) for g in groups] == [len(list(module.parameters()))]
    if first:  # Lightning's own hint that a callback of the checkpoint is missing
        with pytest.warns(UserWarning, match="LayerwiseLRDecay"):
            resumed, _ = run(epochs=4, ckpt_path=path)
    else:
        resumed, _ = run(decay(0.6), epochs=4, ckpt_path=path)
    assert resumed.global_step == 24


def test_optimizer_that_keeps_state_per_group_resumes_exactly(tmp_path: Path) -> None:
    class Averaging(torch.optim.SGD):
        """Weighs each step by its rate, as schedule-free optimizers do, in a group entry."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure else None
            for group in self.param_groups:
                group["weight_sum"] = group.get("weight_sum", 0.0) + group["lr"] ** 2
                share = group["lr"] ** 2 / group["weight_sum"]
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] * share)
            return loss

    def ours(module: Any) -> Any:
        return Averaging(module.parameters(), lr=0.3)

    def by_hand(module: Any) -> Any:
        groups = [
            {
                "params": [p for n, p in module.named_parameters() if depth(n) == d],
                "lr": 0.3 * 0.6 ** (3 - d),
            }
            for d in range(4)
        ]
        return Averaging(groups, lr=0.3)

    _, reference = run(epochs=4, make=by_hand)
    _, straight = run(decay(0.6), epochs=4, make=ours)
    assert_equal(straight, reference)
    half, _ = run(decay(0.6), epochs=2, make=ours)
    half.save_checkpoint(path := str(tmp_path / "half.ckpt"))
    _, resumed = run(decay(0.6), epochs=4, ckpt_path=path, make=ours)
    assert_equal(resumed, reference)


class UnfreezeLater(plc.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.embed, pl_module.net.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer, lr=0.02)


def test_unfreezing_mid_run_shifts_no_rate(tmp_path: Path) -> None:
    def make(module: Any) -> Any:
        return SpySGD([p for p in module.parameters() if p.requires_grad], lr=0.1)

    module = Module(make)
    t = trainer(UnfreezeLater(), decay(0.5), max_epochs=3)
    t.fit(module, loader())
    (spy,) = t.optimizers
    head, block = module.net.head.weight, module.net.blocks[0].up.weight
    assert id(block) not in spy.rates[0]
    assert {rates[id(head)] for rates in spy.rates} == {0.1}
    assert spy.rates[-1][id(block)] == pytest.approx(0.02 * 0.25, rel=1e-12)
    t.save_checkpoint(path := str(tmp_path / "unfrozen.ckpt"))
    resumed = Module(make)
    t = trainer(UnfreezeLater(), decay(0.5), max_epochs=4)
    t.fit(resumed, loader(), ckpt_path=path)
    rates = t.optimizers[0].rates[-1]
    assert rates[id(resumed.net.blocks[0].up.weight)] == pytest.approx(0.02 * 0.25, rel=1e-12)


def test_frozen_teacher_after_the_student_is_not_counted() -> None:
    module = Module(lambda m: SpySGD([p for p in m.parameters() if p.requires_grad], lr=0.1))
    module.teacher = Net().requires_grad_(False)
    callback = decay(0.5)
    trainer(callback).fit(module, loader())
    assert callback.multipliers_["net.head.weight"] == 1.0
    assert callback.multipliers_["net.embed.weight"] == pytest.approx(0.5**3, rel=1e-12)
    assert "teacher" in callback.decisions_[0].reason


def test_tied_weights_learn_at_their_deepest_use() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 6, bias=False)
            self.body = nn.Linear(6, 6)
            self.out = nn.Linear(6, 6, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.body(self.embed(x))))

    module = Module(lambda m: SpySGD(m.parameters(), lr=0.1), net=Tied())
    t = trainer(decay(0.5))
    t.fit(module, loader())
    rates = t.optimizers[0].rates[-1]
    assert rates[id(module.net.out.weight)] == 0.1
    assert rates[id(module.net.body.weight)] == 0.05


def test_monitors_see_base_rates_and_the_logger_sees_the_levels(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    t = trainer(decay(0.5), plc.LearningRateMonitor("epoch"), logger=logger, log_every_n_steps=1)
    t.fit(Module(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), loader())
    logger.save()
    metrics = (Path(logger.log_dir) / "metrics.csv").read_text()
    header, rows = metrics.splitlines()[0].split(","), metrics.splitlines()[1:]
    columns = {
        name: {float(v) for row in rows if (v := row.split(",")[i])}
        for i, name in enumerate(header)
    }
    assert columns["lr-SGD"] == {0.1}
    assert columns["lr-layerwise/level_0"] == {0.1 * 0.5**3}
    assert columns["lr-layerwise/level_3"] == {0.1}
    assert columns["LayerwiseLRDecay/levels"] == {4.0}


@pytest.mark.parametrize("where", ["closure", "step"])
def test_an_exception_leaves_the_user_s_groups(where: str) -> None:
    class Failing(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            self.calls += 1
            if where == "step" and self.calls == 3:
                raise RuntimeError("boom")
            return loss

    class Module3(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if where == "closure" and batch_idx == 2:
                raise RuntimeError("boom")
            return super().training_step(batch, batch_idx)

    module = Module3(lambda m: Failing(m.parameters(), lr=0.1))
    t = trainer(decay(0.5))
    with pytest.raises(RuntimeError, match="boom"):
        t.fit(module, loader())
    (optimizer,) = t.optimizers
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == 0.1
    before = weights(module)
    optimizer.zero_grad()
    module.net(torch.ones(1, 6)).sum().backward()
    gradient = module.net.embed.weight.grad.clone()
    torch.optim.SGD.step(optimizer)
    moved = module.net.embed.weight.detach()
    assert torch.equal(moved, before["net.embed.weight"].add(gradient, alpha=-0.1))


def test_groups_are_whole_inside_training_step() -> None:
    seen = []

    class Looking(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(
                (len(self.trainer.optimizers[0].param_groups), self.optimizers().param_groups)
            )
            return super().training_step(batch, batch_idx)

    trainer(decay(0.5)).fit(Looking(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), loader())
    assert {count for count, _ in seen} == {1}
    assert {len(groups) for _, groups in seen} == {1}


def test_wrapping_optimizers_are_hooked_inside() -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, inner.defaults)
            self.inner = inner
            self.param_groups = inner.param_groups

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    module = Module(lambda m: Lookahead(SpySGD(m.parameters(), lr=0.1)))
    t = trainer(decay(0.5))
    t.fit(module, loader())
    rates = t.optimizers[0].inner.rates[-1]
    assert rates[id(module.net.embed.weight)] == pytest.approx(0.1 * 0.5**3, rel=1e-12)


def test_an_optimizer_may_evaluate_the_closure_again() -> None:
    class Twice(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for _ in range(2):
                with torch.enable_grad():
                    losses.append(float(closure()))
                super().step()

    losses: list[float] = []
    module = Module(lambda m: Twice(m.parameters(), lr=0.1))
    trainer(decay(0.5), max_steps=1).fit(module, loader())
    assert len(losses) == 2
    assert losses[1] < losses[0]  # evaluated anew, after the first half moved the weights


@pytest.mark.parametrize("value", [0, -0.5, 1.5, float("nan"), float("inf")])
def test_decay_out_of_range(value: float) -> None:
    with pytest.raises(ValueError, match=r"decay=.*\(0, 1\]"):
        LayerwiseLRDecay(decay=value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"decay": "0.5"}, TypeError, "decay='0.5'"),
        ({"decay": True}, TypeError, "decay=True"),
        ({"groups": "blocks"}, TypeError, "groups='blocks' must be a list"),
        ({"groups": []}, ValueError, "groups="),
        ({"groups": [1]}, TypeError, r"groups\[0\]=1"),
        ({"no_decay_on_bias_and_norm": "yes"}, TypeError, "no_decay_on_bias_and_norm='yes'"),
    ],
)
def test_bad_arguments_fail_at_construction(options: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        LayerwiseLRDecay(**options)


class NoGroups:
    """Has what Lightning asks of an optimizer, but no groups."""

    def __init__(self, module: Any) -> None:
        self.state: dict[Any, Any] = {}
        self.defaults: dict[Any, Any] = {}
        self.param_groups = ()

    def step(self, closure: Any = None) -> Any:
        return closure()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (NoGroups, {}, TypeError, "NoGroups has no param_groups.*AdamW"),
        (lambda m: torch.optim.LBFGS(m.parameters()), {}, ValueError, "LBFGS.*AdamW"),
        (lambda m: None, {}, ValueError, "no trainable parameter.*configure_optimizers"),
        (adamw, {"groups": ["nothing.*"]}, ValueError, r"groups\[0\]='nothing.\*' matches no"),
        (adamw, {"groups": ["net.blocks", "*.up.*"]}, ValueError, "both claim"),
        (adamw, {"groups": lambda name: -1}, ValueError, "returned -1"),
        (adamw, {"groups": lambda name: 0.5}, TypeError, "returned 0.5"),
    ],
)
def test_bad_runs_fail_before_the_first_batch(
    make: Any, options: Any, error: type, message: str
) -> None:
    class Unreached(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("a batch was run")

    with pytest.raises(error, match=message):
        trainer(LayerwiseLRDecay(**options)).fit(Unreached(make), loader())


def test_nothing_trainable() -> None:
    module = Module(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    module.net.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        trainer(decay()).fit(module, loader())


def test_groups_by_pattern_and_by_callable() -> None:
    patterns = decay(0.5, groups=["net.embed", "net.blocks.*"])
    run(patterns, epochs=1)
    by_callable = decay(0.5, groups=lambda n: 0 if "embed" in n else 1 if "blocks" in n else 2)
    run(by_callable, epochs=1)
    assert patterns.multipliers_ == by_callable.multipliers_
    assert patterns.multipliers_["net.embed.weight"] == 0.25
    assert patterns.multipliers_["net.blocks.1.up.bias"] == 0.5
    assert patterns.multipliers_["net.head.bias"] == 1.0
