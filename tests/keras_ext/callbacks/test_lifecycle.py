"""LayerwiseLRDecay in the life of a model: failed fits, saved models, other callbacks."""

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
from tests.keras_ext.helpers import BACKEND, assert_same, data, fit, network, warned, weights


def compiled(optimizer: Any = "adam", **options: Any) -> keras.Model:
    model = network()
    model.compile(optimizer, "mse", **options)
    return model


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise RuntimeError("boom")


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


def test_a_model_saved_in_the_fit_or_after_it_loads_without_this_package(tmp_path: Path) -> None:
    model = compiled()
    during, after = str(tmp_path / "during.keras"), str(tmp_path / "after.keras")
    fit(model, LayerwiseLRDecay(0.5), keras.callbacks.ModelCheckpoint(during))
    model.save(after)
    x, y = data()
    np.savez(tmp_path / "data.npz", x=x, y=y, expected=model.predict(x, verbose=0))
    script = f"""
import sys
for name in ("keras_ext", "strategies", "lightning_ext", "augment"):
    sys.modules[name] = None
import keras, numpy as np
file = np.load({str(tmp_path / "data.npz")!r})
for path in {[during, after]}:
    model = keras.saving.load_model(path)
    predicted = model.predict(file["x"], verbose=0)
    np.testing.assert_allclose(predicted, file["expected"], rtol=1e-5, atol=1e-6)
    model.fit(file["x"], file["y"], batch_size=8, shuffle=False, verbose=0)
np.save({str(tmp_path / "refitted.npy")!r}, model.predict(file["x"], verbose=0))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    fit(model, epochs=1)
    refitted = np.load(tmp_path / "refitted.npy")
    np.testing.assert_allclose(refitted, model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX keeps the state outside of the model")
def test_state_stays_with_jax_during_an_epoch() -> None:
    """Looking at `self.model` between two steps would move all state at each of them."""

    class CountsSyncs(keras.Sequential):
        synced = 0

        def jax_state_sync(self) -> None:
            type(self).synced += not self._jax_state_synced
            super().jax_state_sync()

    counted = []
    for callbacks in ([], [LayerwiseLRDecay(0.5)]):
        CountsSyncs.synced = 0
        model = CountsSyncs([keras.Input((4,)), layers.Dense(2), layers.Dense(1)])
        model.compile("sgd", "mse")
        fit(model, *callbacks, batch_size=2)
        counted.append(CountsSyncs.synced)
    assert counted[0] == counted[1]


def test_restored_decisions_go_on_and_are_not_repeated() -> None:
    first, second = LayerwiseLRDecay(0.5), LayerwiseLRDecay(0.5)
    model = compiled()
    fit(model, first)
    second.load_state_dict(first.state_dict())
    fit(model, second)
    assert [d.step for d in second.decisions_] == [0]
    fit(model, second)
    assert [d.step for d in second.decisions_] == [12]


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


@pytest.mark.skipif(BACKEND == "jax", reason="an optimizer has to be built outside of its step")
@pytest.mark.parametrize("force", [False, True])
def test_compiled_anew_in_the_middle_of_the_fit(force: bool) -> None:
    class Recompiles(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                self.model.compile(keras.optimizers.SGD(0.2), "mse")
                self.model.make_train_function(force=force)

    first, then = LayerwiseLRDecay(0.5), compiled(keras.optimizers.SGD(0.1))
    fit(then, first, epochs=1)
    then.compile(keras.optimizers.SGD(0.2), "mse")
    fit(then, first, epochs=1)
    for order in (1, -1):
        model, callback = compiled(keras.optimizers.SGD(0.1)), LayerwiseLRDecay(0.5)
        fit(model, *[Recompiles(), callback][::order], epochs=2)
        assert_same(weights(model), weights(then))
        assert UpdateScaling.acting_on(model.optimizer) is None


@pytest.mark.skipif(BACKEND == "jax", reason="its train_on_batch refuses a foreign variable")
def test_an_optimizer_of_two_models() -> None:
    """What it changes of another model in the middle of the fit, it changes at the full rate."""
    shared = keras.optimizers.SGD(0.1)
    one, other, twin = compiled(shared), network(), network()
    shared.build(one.trainable_variables + other.trainable_variables)
    other.compile(shared, "mse")
    twin.compile(keras.optimizers.SGD(0.1), "mse")

    class TrainsOther(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            other.train_on_batch(*data())

    with warned("is no trainable variable of the model, at the full rate"):
        fit(one, LayerwiseLRDecay(0.5), TrainsOther(), epochs=1)
    twin.train_on_batch(*data())
    assert_same(weights(other), weights(twin))


@pytest.mark.skipif(BACKEND == "jax", reason="trained by a GradientTape or by backward()")
def test_a_train_step_with_an_optimizer_of_its_own_is_noticed() -> None:
    class Own(keras.Sequential):
        def train_step(self, *args: Any) -> Any:
            return {"loss": keras.ops.mean(self(data()[0]))}  # as if another one had stepped

    model, callback = Own(network().layers), LayerwiseLRDecay(0.5)
    model.compile("sgd", "mse")
    with warned(r"SGD made no update.*compile\(\) the optimizer that"):
        fit(model, callback)
    assert [d.action for d in callback.decisions_].count("fall back") == 1


def test_a_model_that_only_says_it_is_built() -> None:
    class SaysBuilt(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = layers.Dense(2), layers.Dense(1)
            self.built = True

        def call(self, x: Any) -> Any:
            return self.head(self.stem(x))

    model, callback = SaysBuilt(), LayerwiseLRDecay(0.5)
    model.compile("sgd", "mse")
    fit(model, callback)
    assert callback.levels_ == {0: 0.5, 1: 1.0}
