"""PredictiveEarlyStopping decides in a resumed run as in an uninterrupted one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ext import PredictiveEarlyStopping
from tests.lightning_ext.curves import Follows, flat, follow, stopping
from tests.lightning_ext.helpers import weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]

INTERVALS: dict[str, dict[str, Any]] = {
    "each epoch": {},
    "every other epoch": {"check_val_every_n_epoch": 2},
    "twice an epoch": {"val_check_interval": 0.5},
    "every 8 batches": {"val_check_interval": 8, "check_val_every_n_epoch": None},
    "by steps": {"max_epochs": -1, "max_steps": 150, "val_check_interval": 3},
}


class Saves(Callback):
    """Saves at the end of each validation, at its place in the list of callbacks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def checkpoint(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", save_top_k=-1, **options)


SAVERS: dict[str, Any] = {
    "at the end of the epoch": lambda c, f: [c, checkpoint(f, save_on_train_epoch_end=True)],
    "at the end of validation": lambda c, f: [checkpoint(f, save_on_train_epoch_end=False), c],
    "before its turn": lambda c, f: [Saves(f), c],
    "after its turn": lambda c, f: [c, Saves(f)],
}


def told(callback: PredictiveEarlyStopping) -> Any:
    return [(d.step, d.action, d.reason, d.numbers) for d in callback.decisions_]


@pytest.mark.parametrize("intervals", INTERVALS)
@pytest.mark.parametrize("saver", SAVERS)
def test_interrupted_anywhere(saver: str, intervals: str, tmp_path: Path) -> None:
    options = {"enable_checkpointing": "end of" in saver, **INTERVALS[intervals]}
    # The learning rate drops in the middle, so there is a hold and then a stop.
    make = drops_after(96)
    straight = stopping(restore_best=True)
    done = follow(*SAVERS[saver](straight, tmp_path), module=Follows(make=make), **options)
    assert [d.action for d in straight.decisions_ if d.action != "restore"][-2:] == ["hold", "stop"]
    paths = sorted(tmp_path.glob("*.ckpt"), key=lambda p: int("".join(filter(str.isdigit, p.stem))))
    assert len(paths) > 3
    for path in paths[:-1:2]:
        resumed, module = stopping(restore_best=True), Follows(make=make)
        options["enable_checkpointing"] = False
        t = follow(resumed, module=module, ckpt=str(path), **options)
        assert told(resumed) == told(straight), path.name
        assert (t.global_step, t.current_epoch) == (done.global_step, done.current_epoch)
        assert (resumed.best_, resumed.best_epoch_) == (straight.best_, straight.best_epoch_)
        for name, value in weights(module).items():
            assert torch.equal(value, weights(done.lightning_module)[name]), name


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 0.5}])
def test_a_rare_metric_and_a_training_loss_from_validation(options: Any, tmp_path: Path) -> None:
    options = {"enable_checkpointing": False, "max_epochs": 40, **options}
    rare = lambda step: flat(step) if step % 12 == 6 else None  # noqa: E731
    make = drops_after(120)
    straight = stopping(train_monitor="other")
    with pytest.warns(UserWarning, match="is not logged in every validation"):
        follow(Saves(tmp_path), straight, module=Follows(rare, make), **options)
    assert [d.action for d in straight.decisions_][-2:] == ["hold", "stop"]
    paths = sorted(tmp_path.glob("*.ckpt"), key=lambda p: int(p.stem))
    for path in paths[:-1:3]:
        resumed = stopping(train_monitor="other")
        with warnings.catch_warnings(action="ignore"):
            follow(resumed, module=Follows(rare, make), ckpt=str(path), **options)
        assert told(resumed) == told(straight), path.name
        ours, theirs = (c.state_dict()["rule"] for c in (resumed, straight))
        assert ours == theirs


@pytest.mark.parametrize("improves", [True, False])
def test_best_weights_that_the_checkpoint_lacks(improves: bool, tmp_path: Path) -> None:
    curve = lambda step: -step if improves else abs(step - 12)  # noqa: E731
    half = follow(stopping(min_improvement=0.0), module=Follows(curve), max_epochs=4)
    half.save_checkpoint(path := str(tmp_path / "half.ckpt"))
    callback = stopping(min_improvement=0.0, restore_best=True)
    with warnings.catch_warnings(record=True, action="always") as seen:
        follow(callback, module=Follows(curve), max_epochs=6, ckpt=path)
    message = "those of the best epoch, 2, come from a run without restore_best=True"
    assert any(message in str(w.message) for w in seen) != improves
    assert "restore" not in [d.action for d in callback.decisions_]


def drops_after(steps: int) -> Any:
    def make(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps])
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return make
