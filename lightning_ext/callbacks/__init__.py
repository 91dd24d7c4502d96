"""Callbacks for `Trainer(callbacks=[...])`."""

from lightning_ext.callbacks.early_stopping import PredictiveEarlyStopping
from lightning_ext.callbacks.gradient_checkpointing import DynamicGradientCheckpointing
from lightning_ext.callbacks.layerwise_lr_decay import LayerwiseLRDecay

__all__ = ["DynamicGradientCheckpointing", "LayerwiseLRDecay", "PredictiveEarlyStopping"]
