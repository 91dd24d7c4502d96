"""PredictiveEarlyStopping over several fits: what goes on, what starts afresh, the best weights."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_ext import PredictiveEarlyStopping
from tests.keras_ext.callbacks.curves import FALLING, FLAT, NEVER, Shows, compiled, shown
from tests.keras_ext.helpers import BACKEND, assert_same, data, fit, warned, weights

WAVES = [1.0, 0.6, 0.7, 0.5, 0.55, 0.3, 0.45, 0.46, 0.41, 0.42, 0.39, 0.4]  # best after epoch 6


class Dies(keras.callbacks.Callback):
    """Ends the process, as far as the fit can tell, when an epoch begins or has ended."""

    def __init__(self, epoch: int, hook: str = "on_epoch_begin") -> None:
        super().__init__()

        def die(at: int, logs: Any = None) -> None:
            if at == epoch:
                raise KeyboardInterrupt

        setattr(self, hook, die)


class Keeps(keras.callbacks.Callback):
    """The weights after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.by_epoch: dict[int, list[np.ndarray]] = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.by_epoch[epoch] = self.model.get_weights()


def told(stopping: PredictiveEarlyStopping) -> list[Any]:
    return [(d.step, d.action, d.reason, dict(d.numbers)) for d in stopping.decisions_]


def state(stopping: PredictiveEarlyStopping) -> dict[str, Any]:
    kept = stopping.state_dict()
    return {name: kept[name] for name in ("curve", "evaluations")}


@pytest.fixture
def uninterrupted(eager: None) -> PredictiveEarlyStopping:
    stopping = PredictiveEarlyStopping("val_loss", start_from_epoch=8, restore_best=True)
    shown(WAVES, stopping)
    assert stopping.stopped_epoch_ == 8
    return stopping


def same_as(stopping: PredictiveEarlyStopping, **options: Any) -> PredictiveEarlyStopping:
    return PredictiveEarlyStopping(**stopping.get_config() | options)


def assert_decided_alike(a: PredictiveEarlyStopping, b: PredictiveEarlyStopping) -> None:
    assert told(a) == told(b)
    assert state(a) == state(b)
    assert (a.stopped_epoch_, a.best_, a.best_epoch_) == (b.stopped_epoch_, b.best_, b.best_epoch_)


@pytest.mark.parametrize("at", [1, 4, 6, 7])
class TestInterrupted:
    """At any point, it decides as if nothing had happened."""

    def test_goes_on_from_the_file_by_initial_epoch(
        self, uninterrupted: PredictiveEarlyStopping, at: int, tmp_path: Path
    ) -> None:
        path, model = tmp_path / "state.json", compiled()
        stopping = same_as(uninterrupted, state_path=path)
        shown(WAVES, stopping, model=model, epochs=at)
        again = same_as(stopping)
        shown(WAVES, again, model=model, initial_epoch=at)
        # The budget of the first fit was another one, and its weights went back to the best.
        assert again.stopped_epoch_ == uninterrupted.stopped_epoch_
        assert state(again)["curve"]["values"] == WAVES[:9]
        assert again.best_epoch_ == 5

    @pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end"])
    def test_goes_on_from_the_file_by_backup(
        self, uninterrupted: PredictiveEarlyStopping, at: int, tmp_path: Path, hook: str
    ) -> None:
        """Dying in `on_epoch_end`, it has seen an epoch that the backup has not."""
        path, backup = tmp_path / "state.json", str(tmp_path / "backup")
        keeps = Keeps()

        def run(*others: keras.callbacks.Callback) -> tuple[Any, Any]:
            stopping, model = same_as(uninterrupted, state_path=path), compiled()
            callbacks = [Shows(WAVES), stopping, *others, keras.callbacks.BackupAndRestore(backup)]
            fit(model, keeps, *callbacks, epochs=len(WAVES))
            return stopping, model

        with pytest.raises(KeyboardInterrupt):
            run(Dies(at, hook))
        again, model = run()
        assert_decided_alike(again, uninterrupted)
        for mine, best in zip(model.get_weights(), keeps.by_epoch[5], strict=True):
            np.testing.assert_array_equal(mine, best)

    def test_goes_on_from_a_state_that_the_user_kept(
        self, uninterrupted: PredictiveEarlyStopping, at: int
    ) -> None:
        model = compiled()
        first = same_as(uninterrupted, restore_best=False)
        with pytest.raises(KeyboardInterrupt):
            shown(WAVES, first, Dies(at), model=model)
        kept = json.loads(json.dumps(first.state_dict(), allow_nan=False))
        again = same_as(first)
        again.load_state_dict(kept)
        shown(WAVES, again, model=model, initial_epoch=at)
        plain = same_as(first)
        shown(WAVES, plain)
        assert_decided_alike(again, plain)


@pytest.mark.usefixtures("eager")
class TestHistory:
    def test_without_a_file_a_fit_begins_with_none(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss")
        with warned("begins at epoch 11, and the history of the epochs before it is not known; to"):
            shown(FALLING, stopping, initial_epoch=10)
        assert stopping.stopped_epoch_ == 12
        assert state(stopping)["evaluations"]["first"] == 10
        assert str(stopping.reason_).startswith("epoch 13: ")
        assert str(stopping.reason_).endswith("stopping saves 17 epochs")

    def test_of_epochs_that_are_run_again_is_cut(self, tmp_path: Path) -> None:
        path = tmp_path / "state.json"
        first = PredictiveEarlyStopping("val_loss", start_from_epoch=9, state_path=path)
        shown(FALLING[:8], first)
        again = same_as(first)
        shown([9.0] * 10, again, initial_epoch=5)
        assert state(again)["curve"]["values"] == FALLING[:5] + [9.0] * 5
        assert again.best_epoch_ == 4
        shown(FALLING[:2], again)  # a fit after the resumed one, with the same object
        assert state(again)["curve"]["values"] == FALLING[:2]

    def test_starts_afresh_from_the_first_epoch(self, tmp_path: Path) -> None:
        path = tmp_path / "state.json"
        stopping = PredictiveEarlyStopping("val_loss", state_path=path, restore_best=True)
        shown(FALLING, stopping)
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "state.json",
            "state.json.best-1.npz",
            "state.json.best-2.npz",
        ]
        for again in (stopping, same_as(stopping)):
            shown(FLAT[::-1], again, epochs=2)
            assert state(again)["curve"]["values"] == FLAT[::-1][:2]
            names = sorted(p.name for p in tmp_path.iterdir())
            assert names == ["state.json", "state.json.best-0.npz"]

    def test_a_second_fit_forgets_the_first(self) -> None:
        stopping, other = (PredictiveEarlyStopping("val_loss") for _ in range(2))
        shown(FALLING, stopping)
        before = told(stopping)
        shown(FALLING, stopping)
        shown(FALLING, other)
        assert told(stopping) == before == told(other)
        assert state(stopping) == state(other)

    def test_of_a_fit_that_counts_from_0_again_goes_on(self) -> None:
        first = PredictiveEarlyStopping("val_loss", start_from_epoch=9)
        shown(WAVES[:6], first)
        again = PredictiveEarlyStopping("val_loss")
        again.load_state_dict(first.state_dict())
        shown([0.9] * 10, again)
        assert again.stopped_epoch_ == 0
        assert state(again)["curve"]["values"] == [*WAVES[:6], 0.9]
        assert (again.best_, again.best_epoch_) == (0.3, -1)
        assert str(again.reason_).endswith("stopping saves 9 epochs")

    def test_no_file(self, tmp_path: Path) -> None:
        stopping = PredictiveEarlyStopping("val_loss", state_path=tmp_path / "none.json")
        with warned(r"begins at epoch 5 and there is no .*none\.json, so the history is empty"):
            shown(FALLING, stopping, initial_epoch=4)
        assert stopping.stopped_epoch_ == 6

    def test_the_file_of_another_metric(self, tmp_path: Path) -> None:
        path = tmp_path / "state.json"
        shown(FALLING, PredictiveEarlyStopping("val_loss", state_path=path))
        with pytest.raises(ValueError, match=r"is of monitor='val_loss', got monitor='loss'"):
            shown(FALLING, PredictiveEarlyStopping("loss", state_path=path), initial_epoch=3)

    def test_copies_in_the_middle_of_a_fit(self) -> None:
        copies: list[PredictiveEarlyStopping] = []

        class Copies(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                copies.extend([copy.deepcopy(stopping), pickle.loads(pickle.dumps(stopping))])

        rate = keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr)
        stopping = PredictiveEarlyStopping("val_loss", restore_best=True)
        fit(compiled(), Shows(FALLING), rate, stopping, Copies(), epochs=30)
        assert [c.best_epoch_ for c in copies] == [0, 0, 1, 1, 2, 2]
        shown(FALLING, copies[0])
        assert told(copies[0]) == told(stopping)


class TestBestWeights:
    @pytest.mark.parametrize("stops", [True, False])
    def test_are_the_model_s_in_the_end(self, stops: bool, request: pytest.FixtureRequest) -> None:
        if stops:
            request.getfixturevalue("eager")
        options = {"start_from_epoch": 8} if stops else NEVER
        stopping, keeps, model = (
            PredictiveEarlyStopping("val_loss", restore_best=True, **options),
            Keeps(),
            compiled(),
        )
        history = shown(WAVES, stopping, keeps, model=model)
        assert len(history.epoch) == (9 if stops else len(WAVES))
        assert stopping.best_epoch_ == 5
        for mine, best in zip(model.get_weights(), keeps.by_epoch[5], strict=True):
            np.testing.assert_array_equal(mine, best)
        last = stopping.decisions_[-1]
        assert (last.action, last.reason) == ("restore", "epoch 6: its weights are the best")

    def test_stay_away_unless_asked_for(self) -> None:
        stopping, model, plain = (
            PredictiveEarlyStopping("val_loss", **NEVER),
            compiled(),
            compiled(),
        )
        shown(WAVES, stopping, model=model)
        fit(plain, epochs=len(WAVES))
        assert_same(weights(model), weights(plain), rtol=0)

    def test_of_an_earlier_fit_are_missed(self) -> None:
        model, first = compiled(), PredictiveEarlyStopping("val_loss", restore_best=True, **NEVER)
        shown(WAVES[:7], first, model=model)
        again = same_as(first)
        again.load_state_dict(first.state_dict())
        with warned(
            r"those of the best epoch, 6, are of an earlier fit and not at hand; state_path"
        ):
            shown(WAVES, again, model=model, initial_epoch=7)

    def test_of_the_last_epoch_need_no_restoring(self) -> None:
        stopping = PredictiveEarlyStopping("val_loss", restore_best=True, **NEVER)
        model, plain = compiled(), compiled()
        shown(FALLING[:5], stopping, model=model)
        fit(plain, epochs=5)
        assert_same(weights(model), weights(plain), rtol=0)
        assert "restore" not in {d.action for d in stopping.decisions_}

    def test_nothing_was_any_good(self) -> None:
        model, plain = compiled(), compiled()
        stopping = PredictiveEarlyStopping("val_loss", restore_best=True)
        shown([math.nan] * 3, stopping, model=model)
        fit(plain, epochs=3)
        assert_same(weights(model), weights(plain), rtol=0)
        assert stopping.best_ is None

    def test_with_frozen_and_half_precision_layers(self, tmp_path: Path) -> None:
        keras.config.set_dtype_policy("mixed_bfloat16" if BACKEND != "torch" else "float32")
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(3, dtype="bfloat16", trainable=False),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile("adam", "mse")
        options = {"restore_best": True, "state_path": tmp_path / "s.json", **NEVER}
        stopping, keeps = PredictiveEarlyStopping("val_loss", **options), Keeps()
        with pytest.raises(KeyboardInterrupt):
            shown(WAVES, stopping, keeps, Dies(7), model=model)
        shown(WAVES, same_as(stopping), model=model, initial_epoch=7)
        for mine, best in zip(model.get_weights(), keeps.by_epoch[5], strict=True):
            np.testing.assert_array_equal(mine, best)


def test_two_models_side_by_side() -> None:
    stoppings = []

    class Starts(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            stoppings.append(PredictiveEarlyStopping("val_loss", preset="fast"))
            shown(FLAT, stoppings[-1])

    outer = PredictiveEarlyStopping("val_loss", **NEVER)
    shown(FALLING[:3], outer, Starts())
    alone = PredictiveEarlyStopping("val_loss", preset="fast")
    shown(FLAT, alone)
    assert [told(s) for s in stoppings] == [told(alone)] * 3
    assert len(state(outer)["curve"]["values"]) == 3


def test_evaluation_is_no_part_of_a_fit() -> None:
    stopping, model = PredictiveEarlyStopping("val_loss"), compiled()
    before = stopping.state_dict()
    model.evaluate(*data(), callbacks=[stopping], verbose=0)
    assert stopping.state_dict() == before
