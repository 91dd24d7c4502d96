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
    assert names(tmp_path) == ["state.json", "state.json.best-1.npz", "state.json.best-4.npz"]
    like = [np.zeros(3, "float32"), np.zeros((), "int32")]
    again = StateFile(str(tmp_path / "state.json"))
    again.read()
    assert again.read_weights(0, like) is None
    for epoch in (1, 4):
        vector, number = again.read_weights(epoch, like) or []
        assert (vector.tolist(), number.item()) == ([epoch] * 3, epoch)
    again.write_weights(2, like)  # the fit went back to epoch 2
    again.write({})
    assert names(tmp_path) == ["state.json", "state.json.best-1.npz", "state.json.best-2.npz"]
    again.clear()
    again.write({})
    assert names(tmp_path) == ["state.json"]


@pytest.mark.parametrize(
    ("one", "other"),
    [("run.loss", "run.acc"), ("es_0.5", "es_0.9"), ("a", "a.best-0"), ("[a]", "a"), ("*", "a")],
)
def test_two_files_side_by_side(tmp_path: Path, one: str, other: str) -> None:
    files = [StateFile(str(tmp_path / name)) for name in (one, other)]
    for value, file in enumerate(files):
        file.write_weights(3, [np.array(value)])
    for file in files * 2:
        file.write({})
    for value, file in enumerate(files):
        (kept,) = file.read_weights(3, [np.array(0)]) or []
        assert kept == value
    expected = [name + end for name in (one, other) for end in ("", ".best-3.npz")]
    assert names(tmp_path) == sorted(expected)


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


@pytest.mark.parametrize("damage", [b"", b"PK", b"words"])
def test_damaged_weights_count_as_none(tmp_path: Path, damage: bytes) -> None:
    file = StateFile(str(tmp_path / "state.json"))
    weights = [np.ones(3)]
    file.write_weights(0, weights)
    file.write({})
    assert file.read_weights(0, [np.zeros(4)]) is None  # of another model
    (tmp_path / "state.json.best-0.npz").write_bytes(damage)
    assert file.read_weights(0, weights) is None


@pytest.mark.parametrize("name", ["", ".", "/", "a\0b"])
def test_a_path_that_cannot_be_a_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="state_path must be the path of a JSON file"):
        StateFile(name)
    with pytest.raises(ValueError, match="state_path must be the path of a JSON file"):
        StateFile(str(tmp_path))
