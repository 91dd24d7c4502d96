"""What all callbacks share: one table for a fit, whoever is in it, and plain state."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from keras_ext import LayerwiseLRDecay
from keras_ext.callbacks._base import DecidingCallback
from tests.keras_ext.helpers import data, fit, network


class Late(DecidingCallback):
    """Decides when the fit ends, after the others may have ended already."""

    def __init__(self, reason: str = "late", *, loud: bool = False) -> None:
        super().__init__()
        self.reason, self.loud = reason, loud

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.decisions_.record(99, "end", self.reason)
        super().on_train_end(logs)


def compiled() -> keras.Model:
    model = network()
    model.compile("sgd", "mse")
    return model


def test_one_table_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    fit(compiled(), LayerwiseLRDecay(0.5), Late("the first"), Late("the second"), verbose=2)
    printed = capsys.readouterr().out
    assert printed.count("Decisions") == 1
    found = [printed.index(reason) for reason in ("3 levels", "the first", "the second")]
    assert found == sorted(found)


def test_silent_fit(capsys: pytest.CaptureFixture[str]) -> None:
    fit(compiled(), Late(), verbose=0)
    assert capsys.readouterr().out == ""


def test_a_fit_after_a_failed_one_tells_its_own_decisions_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise RuntimeError("boom")

    model, callback = compiled(), LayerwiseLRDecay(0.5)
    with pytest.raises(RuntimeError, match="boom"):
        fit(model, callback, Late("never"), Fails(), verbose=2)
    fit(model, callback, Late("once"), verbose=2)
    printed = capsys.readouterr().out
    assert [printed.count(text) for text in ("Decisions", "never", "once", "3 levels")] == [
        1,
        0,
        1,
        1,
    ]


def test_a_callback_list_that_is_used_again(capsys: pytest.CaptureFixture[str]) -> None:
    model, callback = compiled(), Late()
    several = keras.callbacks.CallbackList([callback], add_history=True, model=model, verbose=2)
    for _ in range(2):
        model.fit(*data(), callbacks=several, verbose=2)
    assert capsys.readouterr().out.count("Decisions") == 2
    assert len(callback.decisions_) == 1


def test_arguments_by_keyword_only() -> None:
    callback = Late(loud=True)
    assert callback.get_config() == {"reason": "late", "loud": True}
    assert repr(callback) == "Late(reason='late', loud=True)"
    assert Late.from_config(callback.get_config()).loud
