"""The promises that every public Keras callback keeps, on whichever backend is loaded."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_ext.callbacks as ours
from strategies.decisions import DecisionLog
from tests.contract.examples import KERAS

NAMES = sorted(n for n in ours.__all__ if inspect.isclass(getattr(ours, n)))
X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, size=24)


def make(name: str) -> Any:
    return getattr(ours, name)(**KERAS.get(name, {}))


def network() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", name="stem"),
            keras.layers.Dense(8, activation="tanh", name="body"),
            keras.layers.Dense(3, name="head"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def fit(*callbacks: Any, model: Any = None, epochs: int = 2, **options: Any) -> keras.Model:
    model = model or network()
    defaults = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": epochs}
    model.fit(X, Y, callbacks=list(callbacks), **{**defaults, **options})
    return model


def assert_same_weights(a: keras.Model, b: keras.Model) -> None:
    for x, y in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_array_equal(x, y)


def told(callback: Any) -> list[Any]:
    return [(d.step, d.action, d.reason, d.numbers) for d in callback.decisions_]


def test_something_is_public() -> None:
    assert "LayerwiseLRDecay" in NAMES


@pytest.mark.parametrize("name", NAMES)
class TestEveryCallback:
    def test_is_a_documented_callback(self, name: str) -> None:
        callback = make(name)
        assert isinstance(callback, keras.callbacks.Callback)
        assert isinstance(callback.decisions_, DecisionLog)
        doc = inspect.getdoc(type(callback)) or ""
        for section in ("Args:", "Example:", "Raises:"):
            assert section in doc, f"{name} has no {section}"

    def test_repr_and_config(self, name: str) -> None:
        callback = make(name)
        again = type(callback).from_config(callback.get_config())
        assert repr(callback) == repr(again)
        assert repr(callback).startswith(f"{name}(")
        assert again.get_config() == callback.get_config()

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
    def test_copies_before_and_after_a_fit_work(self, name: str, clone: Any) -> None:
        callback = make(name)
        copied = clone(callback)
        expected = fit(callback)
        assert_same_weights(fit(copied), expected)
        assert_same_weights(fit(clone(callback)), expected)

    def test_state_is_plain_and_round_trips(self, name: str) -> None:
        callback = make(name)
        fit(callback)
        state = json.loads(json.dumps(callback.state_dict()))
        fresh = make(name)
        fresh.load_state_dict(state)
        assert fresh.state_dict() == callback.state_dict()
        assert told(fresh) == told(callback)

    def test_two_models_side_by_side(self, name: str) -> None:
        expected = fit(make(name))

        class StartsAnother(keras.callbacks.Callback):
            inner: Any = None

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if self.inner is None:
                    self.inner = fit(make(name))
                    keras.utils.set_random_seed(0)

        other = StartsAnother()
        assert_same_weights(fit(make(name), other), expected)
        assert_same_weights(other.inner, expected)

    def test_second_fit_starts_afresh_and_none_leaves_a_trace(self, name: str) -> None:
        callback = make(name)
        first = fit(callback)
        decided = told(callback)
        assert_same_weights(fit(callback), first)
        assert told(callback) == decided
        reference = network()
        reference.set_weights(first.get_weights())
        reference.optimizer.build(reference.trainable_variables)
        for mine, its in zip(reference.optimizer.variables, first.optimizer.variables, strict=True):
            mine.assign(np.array(keras.ops.convert_to_numpy(its)))
        assert_same_weights(fit(model=reference), fit(model=first))

    def test_evaluation_leaves_no_state(self, name: str) -> None:
        callback, model = make(name), network()
        before = callback.state_dict()
        model.evaluate(X, Y, callbacks=[callback], verbose=0)
        model.predict(X, callbacks=[callback], verbose=0)
        assert callback.state_dict() == before

    def test_a_failed_fit_leaves_the_next_ones_alone(self, name: str) -> None:
        class Fails(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                raise RuntimeError("boom")

        callback, model = make(name), network()
        weights = model.get_weights()
        with pytest.raises(RuntimeError, match="boom"):
            fit(callback, Fails(), model=model)
        pickle.dumps(callback)
        model.set_weights(weights)
        model.compile(keras.optimizers.Adam(0.01), model.loss)
        assert_same_weights(fit(callback, model=model), fit(make(name)))

    # A callback that keeps a history says that it has lost it.
    @pytest.mark.filterwarnings("ignore:.*history of the epochs before it is not known:UserWarning")
    def test_backup_and_restore_resumes_as_uninterrupted(self, name: str, tmp_path: Path) -> None:
        class Dies(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if epoch == 2:
                    raise KeyboardInterrupt

        straight = fit(make(name), epochs=4)
        backup = str(tmp_path / "backup")
        with pytest.raises(KeyboardInterrupt):
            fit(make(name), keras.callbacks.BackupAndRestore(backup), Dies(), epochs=4)
        resumed = fit(make(name), keras.callbacks.BackupAndRestore(backup), epochs=4)
        for x, y in zip(resumed.get_weights(), straight.get_weights(), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("verbose", [0, 2])
    def test_table_only_when_verbose(
        self, name: str, verbose: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        callback = make(name)
        fit(callback, verbose=verbose)
        printed = capsys.readouterr().out.count("Decisions")
        assert printed == int(verbose > 0 and len(callback.decisions_) > 0)

    def test_saved_in_the_middle_and_loaded(self, name: str, tmp_path: Path) -> None:
        path = str(tmp_path / "model.keras")
        model = fit(make(name), keras.callbacks.ModelCheckpoint(path))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = keras.saving.load_model(path)
        assert_same_weights(loaded, model)
        plain = fit(model=loaded)
        assert_same_weights(plain, fit(model=model))
