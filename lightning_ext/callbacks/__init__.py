"""Callbacks for `Trainer(callbacks=[...])`."""

from lightning_ext.callbacks.early_stopping import PredictiveEarlyStopping
from lightning_ext.callbacks.layerwise_lr_decay import LayerwiseLRDecay

__all__ = ["LayerwiseLRDecay", "PredictiveEarlyStopping"]
