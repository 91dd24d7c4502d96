"""What all callbacks of this package share: a decision log, plain state, and one table per fit."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import keras

from keras_ext.backends.internals import CALLBACK_MODEL
from keras_ext.backends.ranks import is_first_rank
from strategies.decisions import Decision, DecisionLog
from strategies.report import print_decisions


class DecidingCallback(keras.callbacks.Callback):
    """A Keras callback that logs its decisions, and starts afresh with each fit.

    Every argument of `__init__` must be kept in an attribute of the same name.

    Attributes:
        decisions_: What was decided in the last fit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.decisions_ = DecisionLog(type(self).__name__)
        self._restored = False

    def set_model(self, model: keras.Model) -> None:
        if not isinstance(model, keras.Model):
            raise TypeError(
                f"{type(self).__name__} works on Keras 3 models, got {type(model).__module__}."
                f"{type(model).__name__}; build the model with `keras` 3, not with `tf_keras`"
            )
        super().set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self._restored:
            self.decisions_.clear()
        self._restored = False
        _Fit.of(self).join(self)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        _Fit.of(self).leave(self)

    @property
    def state_key(self) -> str:
        """What Lightning asks of a callback first; here only to name the mistake."""
        name = type(self).__name__
        raise AttributeError(  # so that `hasattr` says no
            f"{name} of keras_ext is for Keras' model.fit; "
            f"pass lightning_ext.{name} to a Lightning Trainer"
        )

    @property
    def has_begun(self) -> bool:
        """Whether it is in the running fit already, as it is where a fit gets it twice."""
        return self in _Fit.of(self).running

    def companions(self) -> list[DecidingCallback]:
        """Our other callbacks in the running fit, as far as they have begun."""
        return [other for other in _Fit.of(self).running if other is not self]

    def state_dict(self) -> dict[str, Any]:
        """Decisions so far, as values that JSON can hold."""
        return {"decisions": self.decisions_.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; the next fit goes on from there."""
        self.decisions_.load_state_dict(state["decisions"])
        self._restored = True

    def get_config(self) -> dict[str, Any]:
        """Arguments to build an equal callback with `from_config`."""
        return {name: getattr(self, name) for name in _arguments(type(self))}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DecidingCallback:
        """Build a callback from what `get_config` returned."""
        return cls(**config)

    def __repr__(self) -> str:
        changed = [
            f"{name}={value!r}"
            for i, (name, value) in enumerate(self.get_config().items())
            if i == 0 or value != _arguments(type(self))[name].default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    def __getstate__(self) -> dict[str, Any]:
        # A model is saved by other means; a callback is not to take it along.
        return self.__dict__ | {CALLBACK_MODEL: None, "params": None}


def _arguments(cls: type) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(cls).parameters.items()))


class _Fit:
    """Our callbacks in one fit of one model; the last of them to end prints what all decided."""

    _latest: ClassVar[WeakKeyDictionary[keras.Model, _Fit]] = WeakKeyDictionary()

    def __init__(self, params: dict[str, Any] | None) -> None:
        self.params = params
        # Weak, for after a failed fit this object stays, and must not keep the model alive.
        self.running: WeakSet[DecidingCallback] = WeakSet()
        self.decisions: list[Decision] = []

    @classmethod
    def of(cls, callback: DecidingCallback) -> _Fit:
        """The fit that a callback is in; Keras gives one `params` to all callbacks of a fit."""
        fit = cls._latest.get(callback.model)
        if fit is None or fit.params is not callback.params:
            fit = cls._latest[callback.model] = cls(callback.params)
        return fit

    def join(self, callback: DecidingCallback) -> None:
        self.running.add(callback)

    def leave(self, callback: DecidingCallback) -> None:
        self.running.discard(callback)
        self.decisions += callback.decisions_
        if not self.running:
            decisions, self.decisions = self.decisions, []
            if self.params and self.params.get("verbose", 0) != 0 and is_first_rank():
                print_decisions(decisions)
