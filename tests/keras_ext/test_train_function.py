"""Changes that last for one fit, made by several callbacks at a time."""

from __future__ import annotations

from collections.abc import Callable

import keras
import pytest

from keras_ext.backends.patches import Patches
from keras_ext.backends.train_function import release, release_all, retrace
from tests.keras_ext.helpers import data, network


@pytest.fixture
def model() -> keras.Model:
    model = network()
    model.compile("sgd", "mse")
    return model


def undos(names: str, done: list[str]) -> list[Callable[[], None]]:
    return [lambda name=name: done.append(name) for name in names]


def untouched(model: keras.Model) -> bool:
    return not {"make_train_function", "train_step"} & set(vars(model))


def test_each_takes_off_its_own(model: keras.Model) -> None:
    done: list[str] = []
    first, second = undos("ab", done)
    retrace(model, first)
    retrace(model, second)
    release(model, first)
    assert done == ["a"]
    assert not untouched(model)
    release(model, second)
    assert done == ["a", "b"]
    assert untouched(model)
    assert model.train_function is None


def test_all_come_off_as_the_next_fit_begins(model: keras.Model) -> None:
    done: list[str] = []
    for undo in undos("abc", done):
        retrace(model, undo)
    model.make_train_function(force=True)  # another callback that changes the step
    assert done == []
    model.make_train_function()
    assert sorted(done) == ["a", "b", "c"]
    assert untouched(model)
    assert model.train_function is not None


def test_releasing_what_is_off_already_does_nothing(model: keras.Model) -> None:
    done: list[str] = []
    (undo,) = undos("a", done)
    release(model, undo)
    release_all(model)
    retrace(model, undo)
    release_all(model)
    release(model, undo)
    assert done == ["a"]


def test_the_step_is_traced_anew_in_each_fit_and_the_user_s_own_is_kept(
    model: keras.Model,
) -> None:
    traced = []

    def step(*args: object) -> object:
        traced.append(1)
        return type(model).train_step(model, *args)

    class Retraces(keras.callbacks.Callback):
        def on_train_begin(self, logs: object = None) -> None:
            retrace(self.model, self.undo)

        def on_train_end(self, logs: object = None) -> None:
            release(self.model, self.undo)

        def undo(self) -> None:
            """There is nothing to take off."""

    model.train_step = step
    x, y = data()
    for callbacks in ([], [Retraces()], [Retraces()]):
        before = len(traced)
        model.fit(x, y, verbose=0, callbacks=callbacks)
        assert len(traced) > before
    assert vars(model)["train_step"] is step


def test_patches_keep_what_was_there_before() -> None:
    class Thing:
        own = "class"

    thing, patches = Thing(), Patches()
    assert not patches
    thing.mine = "before"
    patches.set(thing, "own", 1)
    patches.set(thing, "own", 2)
    patches.set(thing, "mine", 3)
    assert patches
    assert (thing.own, thing.mine) == (2, 3)
    patches.undo()
    assert vars(thing) == {"mine": "before"}
    assert not patches
