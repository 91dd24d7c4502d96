"""Callbacks for `model.fit(callbacks=[...])`."""

from keras_ext.callbacks.early_stopping import PredictiveEarlyStopping
from keras_ext.callbacks.gradient_checkpointing import DynamicGradientCheckpointing
from keras_ext.callbacks.layerwise_lr_decay import LayerwiseLRDecay

__all__ = ["DynamicGradientCheckpointing", "LayerwiseLRDecay", "PredictiveEarlyStopping"]
