"""What jax keeps for the backward pass, against what was predicted."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import ops

from keras_ext import DynamicGradientCheckpointing
from keras_ext._units import units_of
from keras_ext.backends.recompute import Recompute
from tests.keras_ext.helpers import BACKEND, warned
from tests.keras_ext.recompute_models import Simple, built, data
from tests.keras_ext.test_gradient_checkpointing import assert_equal, everything, fit
from tests.keras_ext.test_recompute_oddities import compare, stack

if BACKEND != "jax":
    pytest.skip("jax alone", allow_module_level=True)

import jax


def residuals(model: keras.Model) -> int:
    """Bytes that a step keeps, without variables and data."""
    x, y = map(jax.numpy.asarray, data(8))
    trained, others, metrics, optimizer = (
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.metrics_variables,
            model.optimizer.variables,
        )
    )

    def loss(trained: Any) -> Any:
        return model.compute_loss_and_updates(
            trained, others, metrics, x, y, None, training=True, optimizer_variables=optimizer
        )

    _, backward, _ = jax.vjp(loss, trained, has_aux=True)
    known = {id(value) for value in (*trained, *others, x, y)}
    found = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(backward)}
    return sum(size for key, size in found.items() if key not in known)


@pytest.mark.parametrize("kind", ["transformer", "convolutional", "residual", "subclassed"])
def test_what_is_kept(kind: str) -> None:
    model, ours = built(kind), DynamicGradientCheckpointing(0.5)
    model.fit(*data(8), 8, callbacks=[ours], verbose=0)
    plain = residuals(model)
    assert ours.plan_.plain_peak == pytest.approx(plain, rel=0.1)

    names = frozenset(units_of(model))
    recompute = Recompute(model, units_of(model), lambda measured, why: names)
    recompute.settle((), None)
    recompute.install()
    recompute._in_step = True
    assert residuals(model) <= 0.5 * plain
    recompute.remove()
    assert residuals(model) == plain


def test_tensors_that_go_through_attributes() -> None:
    shelf: dict[str, Any] = {}

    class Gives(Simple):
        def inner(self, x: Any) -> Any:
            shelf["inner"] = self.up(x)
            return shelf["inner"]

    class Takes(Simple):
        def inner(self, x: Any) -> Any:
            return self.up(x) + ops.mean(shelf["inner"])

    said = "blocks are run again fails .*that only its inside knows.: the fit is a plain one"
    assert compare(lambda i: (Gives, Takes, Takes)[i](name=f"block_{i}"), said).plan_ is None


def test_layers_made_under_a_scope_of_rematerialization() -> None:
    def trained(*callbacks: Any) -> keras.Model:
        with keras.RematScope("full"):
            model = stack(lambda i: Simple(name=f"block_{i}"))
            fit(model, *callbacks)
        return model

    plain = trained()
    with warned("made under keras.RematScope cannot be traced twice: the fit is a plain one"):
        assert_equal(everything(trained(DynamicGradientCheckpointing(0.5))), everything(plain))


def test_eager_steps_of_your_own_run_once() -> None:
    class Counts(keras.Model):
        steps = 0

        def train_step(self, state: Any, batch: Any) -> Any:
            Counts.steps += 1
            return super().train_step(state, batch)

    base = built("sequential")
    model = Counts(base.inputs, base.outputs)
    model.compile("sgd", "mse", run_eagerly=True)
    with warned("a train_step of your own is not traced: the fit is a plain one"):
        fit(model, DynamicGradientCheckpointing(0.5))
    assert Counts.steps == 4
