"""A file of state that is whole whenever the process dies."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from keras_ext._state_file import StateFile


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "state.json")
    file = StateFile(path)
    assert file.read() is None
    file.write({"a": [1.5]})
    assert StateFile(path).read() == {"a": [1.5]}
    assert names(tmp_path / "new") == ["state.json"]


def test_weights_of_the_last_two_best_epochs_stay(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path / "state.json"))
    for epoch in (0, 1, 4):
        file.write_weights(epoch, [np.full(3, epoch, "float32"), np.array(epoch, "int32")])
        file.write({})
    assert names(tmp_path) == ["state.best-1.npz", "state.best-4.npz", "state.json"]
    like = [np.zeros(3, "float32"), np.zeros((), "int32")]
    again = StateFile(str(tmp_path / "state.json"))
    again.read()
    assert again.read_weights(0, like) is None
    for epoch in (1, 4):
        vector, number = again.read_weights(epoch, like) or []
        assert (vector.tolist(), number.item()) == ([epoch] * 3, epoch)
    again.write_weights(2, like)  # the fit went back to epoch 2
    again.write({})
    assert names(tmp_path) == ["state.best-1.npz", "state.best-2.npz", "state.json"]
    again.clear()
    again.write({})
    assert names(tmp_path) == ["state.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path / "state.json"))
    file.write({"epoch": 1})
    with pytest.raises(TypeError):
        file.write({"epoch": object()})
    assert file.read() == {"epoch": 1}


def test_bfloat16(tmp_path: Path) -> None:
    value = keras.ops.convert_to_tensor([1.5, -2.0], "bfloat16")
    with keras.device("cpu"):
        like = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(2, use_bias=False, dtype="bfloat16")]
        ).get_weights()
    weights = [np.asarray(keras.ops.convert_to_numpy(value)).astype(like[0].dtype)[None]]
    file = StateFile(str(tmp_path / "state.json"))
    file.write_weights(0, weights)
    (again,) = file.read_weights(0, like) or []
    assert again.dtype == like[0].dtype
    np.testing.assert_array_equal(again.astype("float32"), [[1.5, -2.0]])


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"weights": "x"}', "1"])
def test_something_else_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"state\.json' holds no state of this callback.*delete"):
        StateFile(str(path)).read()
