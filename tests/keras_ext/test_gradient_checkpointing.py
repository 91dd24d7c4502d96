"""Blocks that are run again change memory and nothing else."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_ext import DynamicGradientCheckpointing
from tests.keras_ext.helpers import BACKEND, warned, weights
from tests.keras_ext.recompute_models import LENGTH, MODELS, WIDTH, Block, built, data, residual

# The plain run is traced and compiled as another program, except on torch.
RTOL = 0 if BACKEND == "torch" else 1e-6
# A budget that nothing fits: all blocks are run again, and it is said that this is too much.
LEAST = 2
# Calls of each block beyond those of a plain run, in two steps and in what is traced.
AGAIN = {"torch": 3, "tensorflow": 6, "jax": 4}[BACKEND]


def fit(model: keras.Model, *callbacks: keras.callbacks.Callback, **options: Any) -> list[float]:
    keras.utils.set_random_seed(1)  # on torch, dropout draws from a generator of the process
    x, y = data()
    arguments = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    history = model.fit(x, y, callbacks=list(callbacks), **arguments)
    losses: list[float] = history.history["loss"]
    return losses


def saver(budget: Any = 0.6, **options: Any) -> DynamicGradientCheckpointing:
    return DynamicGradientCheckpointing(budget, **options)


def everything(model: keras.Model) -> dict[str, np.ndarray]:
    """Weights, statistics, seeds, metrics, and the state of the optimizer."""
    found = [*model.variables, *model.optimizer.variables]
    return {
        f"{i} {v.path}": np.array(ops.convert_to_numpy(v), "float64") for i, v in enumerate(found)
    }


def assert_equal(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = RTOL
) -> None:
    for (name, a), e in zip(actual.items(), expected.values(), strict=True):
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance, err_msg=name)


def assert_like_plain(
    make: Callable[[], keras.Model], *callbacks: Any, rtol: float = RTOL, **options: Any
) -> None:
    plain, ours = make(), make()
    expected = fit(plain, **options)
    np.testing.assert_allclose(fit(ours, *callbacks, **options), expected, rtol=rtol)
    assert_equal(everything(ours), everything(plain), rtol)
    assert untouched(ours)


def untouched(model: keras.Model) -> bool:
    named = vars(model).keys() & {"make_train_function", "train_step"}
    return not named and not any("call" in vars(part) for part in model._flatten_layers())


def calls_of(layer: keras.Layer) -> list[int]:
    """A list that grows with every call of a layer, or every time that it is traced."""
    calls: list[int] = []
    call = type(layer).call

    class Counting(type(layer)):  # type: ignore[misc]
        def call(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return call(self, *args, **kwargs)

    layer.__class__ = Counting
    return calls


# Each traces and compiles several models, which torch does not.
slow = pytest.mark.skipif(False, reason="") if BACKEND == "torch" else pytest.mark.matrix


@pytest.mark.parametrize(
    "kind",
    [k if k in ("convolutional", "shared") else pytest.param(k, marks=slow) for k in MODELS],
)
def test_as_the_plain_run(kind: str) -> None:
    ours = saver()
    assert_like_plain(lambda: built(kind), ours)
    assert ours.plan_.fits
    assert ours.plan_.spans
    assert ours.plan_.peak <= 0.6 * ours.plan_.plain_peak
    assert [d.action for d in ours.decisions_] == ["plan"]


@slow
@pytest.mark.parametrize("kind", ["transformer", "convolutional", "masked"])
def test_as_the_plain_run_with_all_blocks_run_again(kind: str) -> None:
    with warned("the least that its activations can be brought to"):
        assert_like_plain(lambda: built(kind), saver(LEAST))


@slow
@pytest.mark.parametrize(
    ("kind", "policy"), [("transformer", "mixed_bfloat16"), ("convolutional", "mixed_float16")]
)
def test_as_the_plain_run_in_mixed_precision(kind: str, policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    assert_like_plain(lambda: built(kind), saver(), rtol=RTOL if BACKEND == "torch" else 2e-2)


@slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("convolutional", {"jit_compile": True}),
        ("subclassed", {"jit_compile": True}),
        ("convolutional", {"run_eagerly": True}),
        ("subclassed", {"jit_compile": False}),
    ],
)
def test_as_the_plain_run_however_it_is_compiled(kind: str, options: dict[str, Any]) -> None:
    if BACKEND == "torch" and options.get("jit_compile"):
        pytest.skip("compiled dropout draws otherwise; see test_remat_torch.py")
    assert_like_plain(lambda: built(kind, **options), saver())


def test_blocks_are_run_again_in_training_alone() -> None:
    x, y = data()
    counts = []
    for callbacks in ([], [saver(LEAST)]):
        model = built("transformer", run_eagerly=True)
        calls = [calls_of(model.get_layer(f"block_{i}")) for i in range(3)]
        with warned("can be brought to") if callbacks else nullcontext():
            fit(model, *callbacks, epochs=1, validation_data=(x, y))
        counts.append([len(counted) for counted in calls])
        for counted in calls:
            counted.clear()
        model.evaluate(x, y, batch_size=8, verbose=0)
        model.predict(x, batch_size=8, verbose=0)
        counts[-1] += [len(counted) for counted in calls]
    plain, ours = counts
    assert ours == [n + AGAIN for n in plain[:3]] + plain[3:]


@slow
def test_several_inputs_and_outputs_in_nested_models() -> None:
    def block(i: int) -> keras.Model:
        a, b = (keras.Input((LENGTH, WIDTH), name=name) for name in "ab")
        x = layers.Dropout(0.1)(layers.Dense(4 * WIDTH, "tanh")(layers.Concatenate()([a, b])))
        outputs = {"a": layers.Dense(WIDTH)(x) + a, "b": layers.Dense(WIDTH)(x)}
        return keras.Model({"a": a, "b": b}, outputs, name=f"block_{i}")

    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        left, right = keras.Input((LENGTH, 4), name="a"), keras.Input((LENGTH, 4), name="b")
        x = {"a": layers.Dense(WIDTH)(left), "b": layers.Dense(WIDTH)(right)}
        for i in range(3):
            x = block(i)(x)
        model = keras.Model([left, right], layers.Dense(1)(x["a"] + x["b"]))
        model.compile("sgd", "mse", jit_compile=BACKEND == "jax")
        return model

    x, y = data()
    plain, ours, callback = make(), make(), saver(0.7)
    for model, callbacks in ((plain, []), (ours, [callback])):
        keras.utils.set_random_seed(1)
        model.fit([x, -x], y, 4, shuffle=False, verbose=0, callbacks=callbacks)
    assert_equal(everything(ours), everything(plain))
    assert callback.plan_.spans


@slow
def test_stacks_inside_nested_models() -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        inner = residual()
        x = inputs = keras.Input((LENGTH, 4))
        model = keras.Model(inputs, layers.Dense(1)(inner(x)))
        model.compile("sgd", "mse", jit_compile=BACKEND == "jax")
        return model

    ours = saver()
    assert_like_plain(make, ours)
    assert sum("block_" in block.name for block in ours.report_.blocks) == 3


def test_losses_that_blocks_add_are_added_once() -> None:
    class Costly(Block):
        def call(self, x: Any, training: bool | None = None) -> Any:
            self.add_loss(ops.mean(ops.square(x)))
            return super().call(x, training)

    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        x = inputs = keras.Input((LENGTH, 4))
        x = layers.Dense(WIDTH)(x)
        for i in range(3):
            x = Costly(name=f"block_{i}")(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile("sgd", "mse", jit_compile=BACKEND == "jax")
        return model

    assert_like_plain(make, saver())


def test_what_was_measured_is_told() -> None:
    ours = saver()
    fit(built("transformer"), ours, epochs=1)
    assert re.fullmatch(
        r"batch 4x8x4, 4x8x1: activations \d+\.\d\d KiB in the plain run, \d+\.\d\d KiB predicted "
        r"with this plan; \d+\.\d% of (a step's|its blocks') operations run again",
        str(ours.report_),
    )
    # Work outside of blocks is known where there is a graph of all of it.
    assert (ours.report_.forward is not None) == (BACKEND == "tensorflow")
    assert (ours.report_.forward or 1e9) > ours.plan_.forward
    assert "block_2" in ours.report_.explain()
    assert ours.report_.plot().lines


@slow
def test_bytes_and_auto() -> None:
    half, ours, free = saver(), saver("100KiB"), saver("auto")
    for callback in (half, ours, free):
        fit(built("transformer"), callback, epochs=1)
    assert ours.plan_.budget == 100 * 1024
    assert ours.plan_.fits
    assert free.plan_.spans == ()  # there is more than enough
    assert free.plan_.peak == half.plan_.plain_peak


@slow
def test_two_fits_with_one_callback() -> None:
    plain, model, ours = built("convolutional"), built("convolutional"), saver()
    for epochs in (1, 2):
        expected = fit(plain, epochs=epochs)
        np.testing.assert_allclose(fit(model, ours, epochs=epochs), expected, rtol=RTOL)
        assert len(ours.decisions_) == 1
        np.testing.assert_allclose(fit(model), fit(plain), rtol=RTOL)
    assert_equal(everything(model), everything(plain))


def test_the_saved_model_knows_nothing_of_it(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.keras") for name in ("plain", "ours")]
    for path, callbacks in zip(paths, ([], [saver()]), strict=True):
        fit(built("residual"), *callbacks, keras.callbacks.ModelCheckpoint(path))
    configs = [json.loads(zipfile.ZipFile(path).read("config.json")) for path in paths]
    assert re.sub(r"_\d+", "", str(configs[0])) == re.sub(r"_\d+", "", str(configs[1]))
    plain, ours = map(keras.saving.load_model, paths)
    assert_equal(weights(ours), weights(plain))


def test_nothing_is_left_when_a_step_fails() -> None:
    class Fails(Block):
        steps = 0

        def call(self, x: Any, training: bool | None = None) -> Any:
            Fails.steps += 1
            if Fails.steps > 6:
                raise RuntimeError("boom")
            return super().call(x, training)

    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((LENGTH, 4))
    x = layers.Dense(WIDTH)(x)
    for i in range(3):
        x = (Fails if i == 2 else Block)(name=f"block_{i}")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(RuntimeError, match="boom"):
        fit(model, saver(), epochs=20)
    assert untouched(model)


def test_nothing_is_in_force_when_another_callback_fails() -> None:
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise RuntimeError("boom")

    plain, model = built("convolutional"), built("convolutional")
    for it, callbacks in ((plain, []), (model, [saver()])):
        with pytest.raises(RuntimeError, match="boom"):
            fit(it, *callbacks, Fails())
    np.testing.assert_allclose(fit(model), fit(plain), rtol=RTOL)
    assert untouched(model)


@slow
def test_steps_of_other_callbacks_in_between() -> None:
    class Steps(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.train_on_batch(*data(4))

    plain, model = built("transformer"), built("transformer")
    expected = fit(plain, Steps(), epochs=3)
    np.testing.assert_allclose(fit(model, saver(), Steps(), epochs=3), expected, rtol=RTOL)
    assert_equal(everything(model), everything(plain))


@slow
def test_batches_of_several_sizes() -> None:
    ours = saver()
    assert_like_plain(lambda: built("transformer"), ours, batch_size=5)
    assert len(ours.decisions_) == 1  # the smaller last batch follows the plan of the others


@slow
@pytest.mark.skipif(BACKEND == "torch", reason="Keras has no such steps there")
def test_several_steps_at_a_time() -> None:
    ours = saver()
    assert_like_plain(
        lambda: built("transformer", steps_per_execution=2), ours, batch_size=3, epochs=1
    )
    assert ours.plan_.spans


@slow
@pytest.mark.skipif(BACKEND == "tensorflow", reason="plans for the first batch alone")
def test_larger_batches_are_planned_anew() -> None:
    def batches() -> Any:
        for rows in (2, 6, 4, 2):
            yield data(rows)

    plain, model, ours = built("transformer"), built("transformer"), saver()
    for it, callbacks in ((plain, []), (model, [ours])):
        keras.utils.set_random_seed(1)
        it.fit(batches(), callbacks=callbacks, shuffle=False, steps_per_epoch=4, verbose=0)
    assert_equal(everything(model), everything(plain))
    assert [d.reason.split(":")[0] for d in ours.decisions_] == [
        "batch 2x8x4, 2x8x1",
        "batch 6x8x4, 6x8x1",
    ]


@slow
def test_blocks_by_name_class_and_path() -> None:
    for blocks in (["block_1"], [Block]):
        ours = saver(0.95, blocks=blocks)
        fit(built("subclassed"), ours, epochs=1)
        names = {block.name.split("/")[-1] for block in ours.report_.blocks} - {"other code"}
        assert names == ({"block_1"} if blocks != [Block] else {f"block_{i}" for i in range(3)})
    ours = saver(0.95, exclude=["block_0"])
    fit(built("transformer"), ours, epochs=1)
    assert {block.name for block in ours.report_.blocks} == {"block_1", "block_2", "other code"}


def test_a_model_without_blocks_is_trained_plainly_and_that_is_said() -> None:
    def flat() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((LENGTH, 4)), layers.Dense(8), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    ours = saver()
    with warned("no block of layers is left that could be run again: the fit is a plain one"):
        assert_like_plain(flat, ours)
    assert [d.action for d in ours.decisions_] == ["fall back"]
    assert_like_plain(flat, saver("auto"))
    with warned("^DynamicGradientCheckpointing: no block .* name them in blocks=, and fewer"):
        fit(built("residual"), saver(exclude=[layers.Dense]), epochs=1)
