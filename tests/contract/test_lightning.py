"""The promises that every public Lightning callback keeps, whoever wrote it."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.tuner import Tuner
from torch import nn

import lightning_ext.callbacks as ours
from strategies.decisions import DecisionLog
from tests.contract.examples import LIGHTNING
from tests.lightning_ext.helpers import ValidatedModule, loader, trainer, weights

ROOT = Path(__file__).parents[2]
NAMES = sorted(n for n in ours.__all__ if inspect.isclass(getattr(ours, n)))


def make(name: str) -> Any:
    return getattr(ours, name)(**LIGHTNING.get(name, {}))


def sgd(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def fit(*callbacks: Any, module: Any = None, ckpt: str | None = None, **options: Any) -> Any:
    module = module or ValidatedModule(sgd)
    t = trainer(*callbacks, **options)
    t.fit(module, loader(), loader(), ckpt_path=ckpt)
    return t, module


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(weights(a).items(), weights(b).values(), strict=True):
        assert torch.equal(x, y), name


def plain_state(optimizer: Any) -> Any:
    return {
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "hooks": (
            len(optimizer._optimizer_step_pre_hooks),
            len(optimizer._optimizer_step_post_hooks),
        ),
    }


def test_something_is_public() -> None:
    assert "LayerwiseLRDecay" in NAMES


@pytest.mark.parametrize("name", NAMES)
class TestEveryCallback:
    def test_is_a_documented_callback(self, name: str) -> None:
        callback = make(name)
        assert isinstance(callback, Callback)
        doc = inspect.getdoc(type(callback)) or ""
        for section in ("Args:", "Example:", "Raises:"):
            assert section in doc, f"{name} has no {section}"

    def test_repr_names_the_class(self, name: str) -> None:
        assert repr(make(name)).startswith(f"{name}(")

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
    def test_copies_before_and_after_a_fit_work(self, name: str, clone: Any) -> None:
        callback = make(name)
        first = clone(callback)
        _, expected = fit(callback)
        _, same = fit(first)
        assert_same_weights(expected, same)
        _, again = fit(clone(callback))
        assert_same_weights(expected, again)

    def test_decisions_are_a_log(self, name: str) -> None:
        callback = make(name)
        assert isinstance(callback.decisions_, DecisionLog)
        assert callback.decisions_.callback == name

    def test_state_is_plain_and_loads_with_weights_only(self, name: str, tmp_path: Path) -> None:
        callback = make(name)
        fit(callback)
        state = callback.state_dict()
        assert state
        torch.save(state, tmp_path / "state.pt")
        fresh = make(name)
        fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert json.dumps(fresh.state_dict()) == json.dumps(state)

    def test_resumed_run_equals_uninterrupted_run(self, name: str, tmp_path: Path) -> None:
        straight_callback, resumed_callback = make(name), make(name)
        _, straight = fit(straight_callback, max_epochs=3)
        half, _ = fit(make(name), max_epochs=1)
        half.save_checkpoint(path := str(tmp_path / "half.ckpt"))
        _, resumed = fit(resumed_callback, max_epochs=3, ckpt=path)
        assert_same_weights(straight, resumed)
        told = [
            [(d.step, d.action, d.reason, d.numbers) for d in c.decisions_]
            for c in (straight_callback, resumed_callback)
        ]
        assert told[0] == told[1]

    def test_checkpoint_without_it_resumes_with_it(self, name: str, tmp_path: Path) -> None:
        half, _ = fit(max_epochs=1)
        half.save_checkpoint(path := str(tmp_path / "half.ckpt"))
        t, _ = fit(make(name), max_epochs=2, ckpt=path)
        assert t.current_epoch == 2

    def test_checkpoint_with_it_resumes_without_it(self, name: str, tmp_path: Path) -> None:
        half, _ = fit(make(name), max_epochs=1)
        half.save_checkpoint(path := str(tmp_path / "half.ckpt"))
        with pytest.warns(UserWarning, match=name):  # Lightning tells that it is missing
            t, _ = fit(max_epochs=2, ckpt=path)
        assert t.current_epoch == 2

    def test_two_runs_side_by_side(self, name: str) -> None:
        _, expected = fit(make(name))
        inner_done = []

        class StartsAnother(ValidatedModule):
            def on_train_epoch_start(self) -> None:
                if not inner_done:
                    inner_done.append(fit(make(name))[1])

        _, outer = fit(make(name), module=StartsAnother(sgd))
        assert_same_weights(outer, expected)
        assert_same_weights(inner_done[0], expected)

    def test_second_fit_starts_afresh(self, name: str) -> None:
        callback = make(name)
        _, first = fit(callback)
        decided = [(d.step, d.action, d.reason) for d in callback.decisions_]
        _, second = fit(callback)
        assert_same_weights(first, second)
        assert [(d.step, d.action, d.reason) for d in callback.decisions_] == decided

    def test_nothing_is_left_on_the_optimizer(self, name: str) -> None:
        t, _ = fit(make(name))
        plain, _ = fit()
        assert plain_state(t.optimizers[0])["hooks"] == plain_state(plain.optimizers[0])["hooks"]
        assert len(t.optimizers[0].param_groups) == 1

    def test_evaluation_leaves_no_state(self, name: str) -> None:
        callback = make(name)
        before = json.dumps(callback.state_dict())
        module, t = ValidatedModule(sgd), trainer(callback)
        t.validate(module, loader(), verbose=False)
        t.test(module, loader(), verbose=False)
        t.predict(module, loader())
        assert json.dumps(callback.state_dict()) == before

    def test_sanity_check_changes_nothing(self, name: str) -> None:
        with_check, without = make(name), make(name)
        _, a = fit(with_check, num_sanity_val_steps=2)
        _, b = fit(without)
        assert_same_weights(a, b)
        assert len(with_check.decisions_) == len(without.decisions_)

    def test_fast_dev_run(self, name: str) -> None:
        t, _ = fit(make(name), fast_dev_run=True)
        assert t.global_step == 1

    @pytest.mark.filterwarnings("ignore:.*checkpoint:UserWarning")
    def test_lr_find_then_fit(self, name: str, tmp_path: Path) -> None:
        callback, module = make(name), ValidatedModule(sgd)
        module.lr = 0.1
        t = trainer(callback, default_root_dir=tmp_path)
        Tuner(t).lr_find(module, loader(), loader(), num_training=5, update_attr=False)
        t.fit(module, loader(), loader())
        _, expected = fit(make(name))
        assert_same_weights(module, expected)
        assert len(t.optimizers[0].param_groups) == 1

    def test_a_failing_run_leaves_the_next_one_alone(self, name: str) -> None:
        class Fails(ValidatedModule):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if batch_idx == 3:
                    raise RuntimeError("boom")
                return super().training_step(batch, batch_idx)

        callback = make(name)
        with pytest.raises(RuntimeError, match="boom"):
            fit(callback, module=Fails(sgd))
        _, after = fit(callback)
        _, expected = fit(make(name))
        assert_same_weights(after, expected)

    @pytest.mark.parametrize("bar", [True, False])
    def test_table_only_with_a_progress_bar(
        self, name: str, bar: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        callback = make(name)
        fit(callback, enable_progress_bar=bar)
        printed = capsys.readouterr().out.count("Decisions")
        assert printed == int(bar and len(callback.decisions_) > 0)

    def test_built_from_yaml_by_the_cli(self, name: str, tmp_path: Path) -> None:
        config = tmp_path / "config.yaml"
        config.write_text(
            "trainer:\n  accelerator: cpu\n  callbacks:\n"
            f"  - class_path: lightning_ext.{name}\n"
            f"    init_args: {json.dumps(LIGHTNING.get(name, {}))}\n"
        )
        script = (
            "from lightning.pytorch.cli import LightningCLI\n"
            "from lightning.pytorch.demos.boring_classes import BoringModel\n"
            f"cli = LightningCLI(BoringModel, run=False, save_config_callback=None,\n"
            f"                   args=['--config', {str(config)!r}])\n"
            f"print([type(c).__name__ for c in cli.trainer.callbacks])\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert f"'{name}'" in done.stdout, done.stderr
