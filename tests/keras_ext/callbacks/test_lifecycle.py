"""LayerwiseLRDecay in the life of a model: failures, saves, other callbacks, bad input."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from keras_ext import LayerwiseLRDecay
from keras_ext.backends.update_scaling import UpdateScaling
from tests.keras_ext.helpers import assert_same, data, fit, network, weights


def compiled(optimizer: Any = "adam", **options: Any) -> keras.Model:
    model = network()
    model.compile(optimizer, "mse", **options)
    return model


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise RuntimeError("boom")


def test_a_plain_fit_after_a_failed_one_is_plain() -> None:
    models = [compiled(keras.optimizers.SGD(0.1)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="boom"):
        fit(models[0], LayerwiseLRDecay(0.5), Fails())
    models[0].set_weights(models[1].get_weights())
    for model in models:
        fit(model)
    assert_same(weights(models[0]), weights(models[1]))
    assert UpdateScaling.acting_on(models[0].optimizer) is None


def test_multipliers_never_stack_after_failed_fits() -> None:
    expected = compiled(keras.optimizers.SGD(0.1))
    start = expected.get_weights()
    fit(expected, LayerwiseLRDecay(0.5))
    model = compiled(keras.optimizers.SGD(0.1))
    for callback in (LayerwiseLRDecay(0.5), LayerwiseLRDecay(0.7)):
        with pytest.raises(RuntimeError, match="boom"):
            fit(model, callback, Fails())
    model.set_weights(start)
    fit(model, LayerwiseLRDecay(0.5))
    assert_same(weights(model), weights(expected))


def test_a_failed_fit_does_not_keep_its_model_alive() -> None:
    model = compiled()
    with pytest.raises(RuntimeError, match="boom"):
        fit(model, LayerwiseLRDecay(0.5), Fails())
    gone = weakref.ref(model)
    del model
    keras.backend.clear_session(free_memory=True)
    gc.collect()
    assert gone() is None


def test_a_batch_trained_by_another_callback_does_not_end_the_scaling() -> None:
    x, y = data(32)
    seen = []

    class TrainsOnBatch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(UpdateScaling.acting_on(self.model.optimizer) is not None)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                self.model.train_on_batch(x[:8], y[:8])

    model = compiled()
    model.fit(x, y, batch_size=8, callbacks=[LayerwiseLRDecay(0.5), TrainsOnBatch()], verbose=0)
    assert seen == [True] * 4
    assert UpdateScaling.acting_on(model.optimizer) is None


def test_two_in_one_fit_are_refused_and_leave_nothing() -> None:
    model = compiled()
    with pytest.raises(ValueError, match=r"two LayerwiseLRDecay callbacks.*groups="):
        fit(model, LayerwiseLRDecay(0.5), LayerwiseLRDecay(0.9))
    assert UpdateScaling.acting_on(model.optimizer) is None
    fit(model, LayerwiseLRDecay(0.5))


def test_a_model_saved_in_the_fit_loads_without_this_package(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    model = compiled()
    fit(model, LayerwiseLRDecay(0.5), keras.callbacks.ModelCheckpoint(str(path)))
    np.save(tmp_path / "expected.npy", model.predict(data()[0], verbose=0))
    script = f"""
import sys
for name in ("keras_ext", "strategies", "lightning_ext", "augment"):
    sys.modules[name] = None
import keras, numpy as np
model = keras.saving.load_model({str(path)!r})
x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
expected = np.load({str(tmp_path / "expected.npy")!r})
np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)
model.fit(x, expected, verbose=0)
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip().endswith("fine"), done.stderr[-2000:]


def test_restored_decisions_go_on_and_are_not_repeated() -> None:
    first, second = LayerwiseLRDecay(0.5), LayerwiseLRDecay(0.5)
    model = compiled()
    fit(model, first)
    second.load_state_dict(first.state_dict())
    fit(model, second)
    assert [d.step for d in second.decisions_] == [0]
    fit(model, second)
    assert [d.step for d in second.decisions_] == [12]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"decay": 0}, ValueError, r"decay=0 must be in \(0, 1\]"),
        ({"decay": 1.1}, ValueError, r"decay=1.1 must be in \(0, 1\]"),
        ({"decay": float("nan")}, ValueError, "decay=nan"),
        ({"decay": "half"}, TypeError, "decay='half'"),
        ({"groups": "head"}, TypeError, "groups='head' must be a list"),
        ({"groups": []}, ValueError, "groups="),
        ({"no_decay_on_bias_and_norm": 1}, TypeError, "no_decay_on_bias_and_norm=1"),
    ],
)
def test_bad_arguments_fail_at_construction(options: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        LayerwiseLRDecay(**options)


def frozen() -> keras.Model:
    model = network()
    model.trainable = False
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: compiled("ftrl"), {}, TypeError, "Ftrl.*AdamW"),
        (frozen, {}, ValueError, "nothing in.*trainable"),
        (compiled, {"groups": ["nothing"]}, ValueError, r"groups\[0\]='nothing' matches no"),
        (compiled, {"groups": ["a", "a/kernel"]}, ValueError, "both claim 'a/kernel'"),
        (compiled, {"groups": lambda name: -1}, ValueError, "returned -1"),
    ],
)
def test_bad_fits_fail_before_the_first_batch(
    make: Any, options: Any, error: type, message: str
) -> None:
    begun = []

    class Watches(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            begun.append(batch)

    model = make()
    with pytest.raises(error, match=message):
        fit(model, LayerwiseLRDecay(**options), Watches())
    assert begun == []


@pytest.mark.filterwarnings("ignore:.build... was called on layer")
def test_an_unused_layer_does_not_put_off_the_check() -> None:
    class Stray(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.head, self.unused = (layers.Dense(1) for _ in range(3))

        def call(self, x: Any) -> Any:
            return self.head(self.used(x))

    model = Stray()
    model(data()[0])
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"groups\[0\]='nothing'"):
        fit(model, LayerwiseLRDecay(groups=["nothing"]))
    fit(model, LayerwiseLRDecay(0.5))


def test_freezing_a_layer_shifts_no_other() -> None:
    free, partly = LayerwiseLRDecay(0.5), LayerwiseLRDecay(0.5)
    fit(compiled(), free)
    model = network()
    model.get_layer("a").trainable = False
    model.compile("adam", "mse")
    fit(model, partly)
    assert free.multipliers_ == partly.multipliers_
