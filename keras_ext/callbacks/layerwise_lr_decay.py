"""Layer-wise learning-rate decay for any Keras model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras

from keras_ext._layers import layers_from_model
from keras_ext.backends.train_function import release, release_all, retrace
from keras_ext.backends.update_scaling import UpdateScaling, VariableRate
from keras_ext.callbacks._base import DecidingCallback
from strategies.learning_rate import Groups, LayerwiseDecay, without_frozen_tail


class LayerwiseLRDecay(DecidingCallback):
    """Let each layer learn the slower, the nearer it is to the input.

    The rate of a variable at depth `d` of `L` is the optimizer's rate times `decay ** (L - d)`, be
    it a number, a schedule or set by another callback. Decoupled weight decay scales with it. Model
    and optimizer stay as they are compiled; after the fit nothing of it is left on them.

    Use it to fine-tune a pretrained network, with 0.65 to 0.9; not to train from scratch.

    Args:
        decay: Ratio between one level and the next, in (0, 1]. Default: 0.75.
        groups: The user's own levels, as name patterns from the input to the output, or a callable
            from variable name to depth; see `strategies.learning_rate.parameter_depths`. A name is
            the names of the layers that lead to a variable, such as `"encoder/dense_1/kernel"`.
            Default: None, which reads the levels from the structure of the model.
        no_decay_on_bias_and_norm: Whether weight decay leaves biases and normalisation layers
            alone. Default: False.

    Attributes:
        multipliers_: Factor on the learning rate, by variable name.
        levels_: Factor by depth, from the input to the output.
        decisions_: What was decided in the last fit.

    Raises:
        TypeError: An argument has the wrong type, or, when the fit begins, the model is no Keras 3
            model or its optimizer cannot have a rate for each variable.
        ValueError: `decay` is outside (0, 1], or, when the fit begins, `groups` does not fit the
            model, nothing in it is trainable, or another `LayerwiseLRDecay` is in the fit.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(8, name="body"),
        ...      keras.layers.Dense(1, name="head")])
        >>> model.compile("adamw", "mse")
        >>> decay = LayerwiseLRDecay(decay=0.5)
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[decay], verbose=0)
        >>> decay.multipliers_["body/kernel"], decay.multipliers_["head/kernel"]
        (0.5, 1.0)

    Source:
        Clark et al., "ELECTRA" (2020), appendix A; Bao et al., "BEiT" (2021), section 3.1;
        He et al., "Masked Autoencoders" (2021), appendix A.1.
    """

    def __init__(
        self,
        decay: float = 0.75,
        groups: Groups | None = None,
        no_decay_on_bias_and_norm: bool = False,
    ) -> None:
        super().__init__()
        self._rule = LayerwiseDecay(decay, groups, no_decay_on_bias_and_norm)
        self.decay = decay
        self.groups = groups
        self.no_decay_on_bias_and_norm = no_decay_on_bias_and_norm
        self.multipliers_: dict[str, float] = {}
        self.levels_: dict[int, float] = {}
        self._scaling: UpdateScaling | None = None
        self._fell_back = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.multipliers_, self.levels_ = {}, {}
        model = self.model
        if any(isinstance(other, LayerwiseLRDecay) for other in self.companions()):
            release_all(model)
            raise ValueError(
                "two LayerwiseLRDecay callbacks are in one fit; pass one, and describe all levels "
                "in its groups=[...]"
            )
        self._fell_back = False
        scaling = UpdateScaling(model.optimizer, self._rule_for(model))
        if (left := scaling.acting_on(model.optimizer)) is not None:  # from a fit that failed
            left.remove()
        # TensorFlow may build the model in the first step; the rates are settled there.
        if model.built and model.weights:
            scaling.resolve()
        self._scaling = scaling
        self._install()

    def _follow_optimizer(self) -> bool:
        """Turn to the optimizer that the model was compiled anew with, within the fit."""
        assert self._scaling is not None
        model = self.model
        if self._scaling.scales(model.optimizer):
            return False
        release(model, self._scaling.remove)
        self._scaling = UpdateScaling(model.optimizer, self._rule_for(model))
        return True

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._scaling is None:
            return
        # `train_on_batch` called by another callback looks to Keras like the start of a new fit.
        # To look at `self.model` at every step would cost JAX a copy of all state; before the
        # first of an epoch it has none outside of the model.
        lost = not self._scaling.in_force
        if ((batch == 0 or lost) and self._follow_optimizer()) or lost:
            self._install()

    def _rule_for(self, model: keras.Model) -> Callable[[int], list[VariableRate]]:
        return lambda step: self._decide(model, step)

    def _install(self) -> None:
        assert self._scaling is not None
        self._scaling.install()
        retrace(self.model, self._scaling.remove)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._scaling is not None and not self._fell_back and self._scaling.passed_over:
            self._fell_back = True
            reason = (
                f"{type(self.model.optimizer).__name__} made no update through its update_step: "
                "all layers learn at equal rates"
            )
            self.decisions_.record(self._scaling.steps, "fall back", reason)
            warnings.warn(
                f"LayerwiseLRDecay: {reason}; give compile() the optimizer that train_step "
                "applies, and have it update variables in update_step, as those of "
                "keras.optimizers do",
                stacklevel=2,
            )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._scaling is not None:
            release(self.model, self._scaling.remove)
            self._scaling = None
        super().on_train_end(logs)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_scaling": None}

    def _decide(self, model: keras.Model, step: int) -> list[VariableRate]:
        trained = {id(variable): variable for variable in model.trainable_variables}
        if not trained:
            raise ValueError(
                f"nothing in {model.name!r} is trainable; set layer.trainable = True on some layer "
                "and compile again"
            )
        tree = layers_from_model(model)
        left_out: list[str] = []
        if self.groups is None:  # the user's own levels name the whole model
            names = {p.name for p in tree.all_parameters() if p.key in trained}
            tree, left_out = without_frozen_tail(tree, names)
        rates = self._rule.decide(tree)
        self.multipliers_, self.levels_ = dict(rates.multipliers), rates.levels
        reason = rates.reason
        if left_out:
            reason += f"; frozen and not counted: {', '.join(left_out)}"
        numbers = {"levels": len(rates.levels), "lowest": min(rates.levels.values())}
        last = self.decisions_[-1] if self.decisions_ else None
        if last is None or (last.reason, dict(last.numbers)) != (reason, numbers):
            self.decisions_.record(step, "set rates", reason, **numbers)
        return [
            VariableRate(
                trained[p.key], rates.multipliers[p.name], p.name not in rates.no_weight_decay
            )
            for p in tree.all_parameters()
            if p.key in trained
        ]
