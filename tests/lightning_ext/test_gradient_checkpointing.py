"""`DynamicGradientCheckpointing` in real fits: the weights of a plain fit, within the budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ext import DynamicGradientCheckpointing
from lightning_ext._compat import LightningModule, pl
from lightning_ext.recompute.ledger import Ledger, counting
from tests.lightning_ext.recompute.models import MODELS, Transformer


class Module(LightningModule):
    """As a user writes it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.seen = network, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch_idx)
        (x,) = batch
        loss: Tensor = self.network(x).float().square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(x: Tensor, count: int = 10) -> DataLoader[Any]:
    """The same batch several times."""
    data = TensorDataset(x.repeat(count, *[1] * (x.ndim - 1)))
    return DataLoader(data, batch_size=len(x))


def fit(
    module: LightningModule, data: Iterable[Any], *callbacks: Any, **options: Any
) -> pl.Trainer:
    torch.manual_seed(3)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


def state(module: nn.Module) -> list[Tensor]:
    return [t.clone() for t in module.state_dict().values()]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, state(a), state(b)))


def made(name: str) -> tuple[Module, Tensor]:
    make, data = MODELS[name]
    torch.manual_seed(0)
    return Module(make()), data()


@pytest.mark.parametrize("budget", [0.6, 0.3])
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_bit_for_bit(name: str, budget: float) -> None:
    plain, x = made(name)
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(budget)
    expected, found = fit(plain, batches(x)), fit(module, batches(x), callback)
    assert same(plain, module)
    assert expected.callback_metrics == found.callback_metrics
    assert module.seen == list(range(10))
    report, plan = callback.report_, callback.plan_
    assert report is not None
    assert plan is report.plan
    assert plan.extra > 0
    assert report.measured is not None
    assert plan.peak * 0.95 <= report.measured <= plan.peak
    assert plan.fits
    assert [d.action for d in callback.decisions_] == ["plan"]


def test_options_of_the_trainer() -> None:
    for options in (
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"gradient_clip_val": 0.1},
    ):
        plain, x = made("transformer")
        module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.4)
        fit(plain, batches(x), **options)
        fit(module, batches(x), callback, **options)
        assert same(plain, module), options
        assert callback.report_ is not None
        assert callback.report_.measured is not None


class Peaks(pl.Callback):
    """Counts what is held in each step, from outside."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.ledger = Ledger([*pl_module.parameters(), *pl_module.buffers(), *batch])
        self.context = counting(self.ledger)
        self.context.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.context.__exit__(None, None, None)
        self.peaks.append(self.ledger.peak)


def test_shapes_that_change_are_planned_within_a_step() -> None:
    module, _ = made("transformer")
    shapes = [(4, 16)] * 3 + [(8, 16)] * 3 + [(4, 32)] * 3 + [(3, 16), (4, 16), (7, 16)]
    steps = [[torch.randint(50, shape)] for shape in shapes]
    data: DataLoader[Any] = DataLoader(steps, batch_size=None)  # type: ignore[arg-type]
    peaks, callback = Peaks(), DynamicGradientCheckpointing(0.4)
    fit(module, data, peaks, callback)
    decisions = list(callback.decisions_)
    assert [d.step for d in decisions] == [0, 3, 6]
    budgets = [d.numbers["budget"] for d in decisions]
    for i, (shape, peak) in enumerate(zip(shapes, peaks.peaks, strict=True)):
        if i not in (0, 3, 6):  # measured: every block is run again
            kind = [(4, 16), (8, 16), (4, 32)].index(shape) if shape[0] not in (3, 7) else None
            kind = {3: 0, 7: 1}.get(shape[0], kind)  # smaller than a known one
            assert kind is not None
            assert peak <= budgets[kind], i


def test_budget_that_cannot_be_reached_says_what_can() -> None:
    module, x = made("mlp")
    callback = DynamicGradientCheckpointing("1KB")
    with pytest.warns(UserWarning, match="is 1000 bytes for a batch of 64x20; the least that"):
        fit(module, batches(x), callback)
    assert callback.plan_ is not None
    assert not callback.plan_.fits


def test_what_the_device_has_left_is_enough() -> None:
    module, x = made("transformer")
    callback = DynamicGradientCheckpointing()
    fit(module, batches(x), callback)
    assert callback.plan_ is not None
    assert callback.plan_.extra == 0
    assert not any(m._forward_hooks for m in module.network.modules())


def test_validation_and_what_is_left_behind() -> None:
    class Validated(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.network(batch[0]).float().square().mean())

    bare, x = made("transformer")
    plain = Validated(bare.network)
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.3)
    names, kinds = [*module.state_dict()], [type(m) for m in module.modules()]

    def run(module: Module, *callbacks: Any) -> Any:
        torch.manual_seed(3)
        trainer = pl.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=list(callbacks), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, val_check_interval=3,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, batches(x), batches(x, 2))
        return trainer.callback_metrics

    assert run(plain) == run(module, callback)
    assert same(plain, module)
    assert names == [*module.state_dict()]
    assert kinds == [type(m) for m in module.modules()]
    for m in module.modules():
        assert not vars(m).keys() & {"forward", "training_step"}
        assert not m._forward_hooks
        assert not m._forward_pre_hooks


class GAN(LightningModule):
    """Manual optimization, two backward passes in a step, a module that runs in both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.judge = (
            Transformer(3),
            nn.Sequential(nn.Linear(50, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)),
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, sign in ((first, 1.0), (second, -1.0)):
            optimizer.zero_grad()
            self.manual_backward(sign * self.judge(self.generator(batch[0])).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (self.generator, self.judge)]


def test_manual_optimization() -> None:
    plain, x = GAN(), MODELS["transformer"][1]()
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.4)
    fit(plain, batches(x))
    fit(module, batches(x), callback)
    assert same(plain, module)
    assert callback.plan_ is not None
    assert callback.plan_.extra > 0


def test_optimizers_that_run_a_step_several_times() -> None:
    class Bfgs(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    _, x = made("mlp")
    torch.manual_seed(0)
    plain = Bfgs(MODELS["mlp"][0]())
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.5)
    fit(plain, batches(x, 3))
    fit(module, batches(x, 3), callback)
    assert same(plain, module)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_steps_that_are_skipped_and_layers_that_are_frozen() -> None:
    class Skips(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (0, 4) else loss

    make, data = MODELS["transformer"]
    torch.manual_seed(0)
    plain = Skips(make())
    for p in [*plain.network.embed.parameters(), *plain.network.blocks[0].parameters()]:
        p.requires_grad_(False)
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.4)
    fit(plain, batches(data()))
    fit(module, batches(data()), callback)
    assert same(plain, module)
    assert callback.report_ is not None
    assert callback.report_.measured is not None
    frozen = callback.report_.blocks[1]
    assert frozen.name == "network.blocks.0"
    assert frozen.saved == frozen.handed  # beyond its output, which the next one saves


def test_layers_that_are_trained_later_are_planned_anew() -> None:
    class Unfreeze(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, i: int) -> None:
            pl_module.network.blocks.requires_grad_(i >= 4)

    plain, x = made("transformer")
    module, callback = copy.deepcopy(plain), DynamicGradientCheckpointing(0.4)
    fit(plain, batches(x), Unfreeze())
    fit(module, batches(x), Unfreeze(), callback)
    assert same(plain, module)
    assert [d.step for d in callback.decisions_] == [0, 4]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DynamicGradientCheckpointing(0), ValueError, "memory_budget=0: pass a share"),
        (lambda: DynamicGradientCheckpointing(1.5), ValueError, "memory_budget=1.5"),
        (lambda: DynamicGradientCheckpointing(True), TypeError, "memory_budget=True"),
        (lambda: DynamicGradientCheckpointing("much"), ValueError, "memory_budget='much'"),
        (lambda: DynamicGradientCheckpointing(None), TypeError, "memory_budget=None"),
        (lambda: DynamicGradientCheckpointing(0.5, blocks=[3]), TypeError, "blocks="),
        (lambda: DynamicGradientCheckpointing(0.5, blocks=3), TypeError, "blocks=3: pass a list"),
        (lambda: DynamicGradientCheckpointing(0.5, exclude=None), TypeError, "exclude=None"),
        (lambda: DynamicGradientCheckpointing(0.5, []), ValueError, r"blocks=\[\]: pass at least"),
        (lambda: DynamicGradientCheckpointing(0.5, [nn.ReLU()]), TypeError, "blocks="),
    ],
)
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_blocks_that_are_not_there() -> None:
    module, x = made("mlp")
    with pytest.raises(ValueError, match=r"blocks=\['nothing'\]: the module has none"):
        fit(module, batches(x), DynamicGradientCheckpointing(0.5, blocks=["nothing"]))
    with pytest.raises(ValueError, match="exclude="):
        fit(module, batches(x), DynamicGradientCheckpointing(0.5, exclude=[nn.Conv2d]))
    names = ["network.0", "netwrk.9"]
    with pytest.raises(ValueError, match=r"that is 'netwrk.9'; .*; did you mean 'network.9'\?"):
        fit(module, batches(x), DynamicGradientCheckpointing(0.5, exclude=names))


def test_own_blocks_and_exclusions() -> None:
    module, x = made("transformer")
    kinds = [type(module.network.blocks[0])]
    callback = DynamicGradientCheckpointing(0.3, blocks=kinds, exclude=["network.blocks.2"])
    fit(module, batches(x), callback)
    assert callback.report_ is not None
    names = [block.name for block in callback.report_.blocks]
    assert "network.blocks.1" in names
    assert "network.blocks.2" not in names
    assert "network.head" not in names
    # Its work is counted all the same.
    every = DynamicGradientCheckpointing(0.3)
    fit(made("transformer")[0], batches(x), every)
    assert every.report_ is not None
    assert callback.report_.forward == pytest.approx(every.report_.forward, rel=1e-3)
    assert "of a step's operations run again" in str(callback.report_)


def test_the_report() -> None:
    module, x = made("transformer")
    callback = DynamicGradientCheckpointing(0.4)
    fit(module, batches(x), callback)
    report = callback.report_
    assert report is not None
    text = report.explain(3)
    assert "batch 4x16: activations" in text
    assert "network.blocks" in text
    axes = report.plot()
    plain, planned = (line.get_ydata() for line in axes.get_lines()[:2])
    assert max(plain) * 2**20 == pytest.approx(report.plan.plain_peak)
    assert max(planned) * 2**20 == pytest.approx(report.plan.peak)


class ByHand(nn.Module):
    """Attention in three lines, with a mask and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.mT / 32**0.5).masked_fill(torch.ones(16, 16).triu(1).bool(), -1e9)
        weights = nn.functional.dropout(weights.softmax(-1), 0.1, self.training)
        out: Tensor = x + self.proj(weights @ v)
        return out


class Layer(nn.Module):
    """torch's attention, asked for its weights or not."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(32, 4, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(x, x, x, need_weights=self.weights)[0]
        return out


class Gate(nn.Module):
    """A softmax that has nothing to do with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.values = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.gate(x).softmax(-1) * self.values(x)
        return out


@pytest.mark.parametrize(
    ("block", "told"),
    [(ByHand, True), (lambda: Layer(True), True), (lambda: Layer(False), False), (Gate, False)],
)
def test_attention_that_keeps_its_weights_is_told(
    block: Callable[[], nn.Module], told: bool
) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(50, 32), *(block() for _ in range(3)))
    callback = DynamicGradientCheckpointing(0.5)
    fit(Module(network), batches(MODELS["transformer"][1]()), callback)
    assert callback.report_ is not None
    assert bool(callback.report_.advice) == told
    if told:
        # Each of 4 texts has 16 x 16 weights, one or four heads.
        heads = 1 if block is ByHand else 4
        least = 3 * 4 * heads * 16 * 16 * 4
        (text,) = callback.report_.advice
        assert "in 3 blocks (such as network." in text
        size = float(text.split("take ")[1].split(" KiB")[0]) * 1024
        assert least <= size <= 3 * least
