"""A callback of one Lightning package in the Trainer of the other."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import {first}
from lightning_ext import LayerwiseLRDecay
import torch
from {other} import LightningModule, Trainer
from {other}.callbacks import LearningRateMonitor
from {other}.loggers import CSVLogger

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

callback = LayerwiseLRDecay(0.5)
assert not isinstance(callback, __import__("{other}", fromlist=["Callback"]).Callback)
module, data = Net(), torch.ones(4, 4)
before = module.first.weight.detach().clone()
(gradient,) = torch.autograd.grad(module.training_step(data, 0), module.first.weight)
trainer = Trainer(max_steps=1, accelerator="cpu", logger=CSVLogger({folder!r}),
                  callbacks=[callback, LearningRateMonitor()], enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
assert torch.equal(module.first.weight.detach(), before.add(gradient, alpha=-0.05))
trainer.save_checkpoint({folder!r} + "/c.ckpt")
assert "LayerwiseLRDecay" in str(torch.load({folder!r} + "/c.ckpt", weights_only=True)["callbacks"])
trainer.logger.save()
text = open(trainer.logger.log_dir + "/metrics.csv").read()
assert "lr-layerwise/level_0" in text, text
print("fine")
"""


@pytest.mark.parametrize(
    ("first", "other"),
    [("lightning.pytorch", "pytorch_lightning"), ("pytorch_lightning", "lightning.pytorch")],
)
def test_works_in_the_other_package_s_trainer(first: str, other: str, tmp_path: object) -> None:
    script = SCRIPT.format(first=first, other=other, folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("fine"), done.stderr[-3000:]


STOPPING = """
import {first}
from lightning_ext import PredictiveEarlyStopping
import torch
from {other} import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(0.2 + 2.0 ** -self.current_epoch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [27])]

callback = PredictiveEarlyStopping("val_loss", min_improvement=0.05)
data = torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=4)
trainer = Trainer(max_epochs=30, accelerator="cpu", logger=False, callbacks=[callback],
                  enable_checkpointing=False, enable_progress_bar=False,
                  enable_model_summary=False)
trainer.fit(Net(), data, data)
assert trainer.current_epoch == 28, trainer.current_epoch
assert [d.action for d in callback.decisions_] == ["hold", "stop"]
print("fine")
"""


@pytest.mark.parametrize(
    ("first", "other"),
    [("lightning.pytorch", "pytorch_lightning"), ("pytorch_lightning", "lightning.pytorch")],
)
def test_stops_the_other_package_s_trainer(first: str, other: str) -> None:
    script = STOPPING.format(first=first, other=other)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("fine"), done.stderr[-3000:]
