"""Weights are read only as they were written, and the network is what was trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from strategies.early_stopping.network import FORMAT, WEIGHTS, Network, network_of


def columns(moments: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=moments) for name in network_of().names}


def rewritten(path: Path, **changes: np.ndarray) -> Path:
    with np.load(WEIGHTS, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **(arrays | changes))  # type: ignore[arg-type]
    return path


def test_shipped_weights_are_small_and_hold_no_pickle() -> None:
    assert WEIGHTS.stat().st_size <= 1_000_000
    with np.load(WEIGHTS, allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)
    assert set(network_of().prices) == {"safe", "balanced", "fast"}
    assert (
        0
        < network_of().prices["safe"]
        < network_of().prices["balanced"]
        < network_of().prices["fast"]
    )


def test_round_trip(tmp_path: Path) -> None:
    network_of().save(tmp_path / "w.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["w.npz"]
    copy, x = Network.load(tmp_path / "w.npz"), columns()
    np.testing.assert_array_equal(copy(x).probabilities, network_of()(x).probabilities)
    assert copy.prices == network_of().prices


def test_probabilities_are_some(  # of whatever features
) -> None:
    opinion = network_of()(columns(50) | {network_of().names[0]: np.full(50, 1e30)})
    np.testing.assert_allclose(opinion.probabilities.sum(axis=-1), 1)
    assert (opinion.probabilities >= 0).all()
    assert ((opinion.places >= 0) & (opinion.places <= 1)).all()
    assert (opinion.strangeness > 0).all()


def test_a_higher_price_never_stops_later_on_average() -> None:
    opinion = network_of()(columns(200))
    odds = network_of().stopping(opinion, np.geomspace(0.003, 0.3, 6)).mean(axis=(0, 2))
    assert (np.diff(odds) > 0).all()


def test_one_changed_weight_is_an_error(tmp_path: Path) -> None:
    with np.load(WEIGHTS, allow_pickle=False) as file:
        changed = file["w2"].copy()
    changed[0, 0, 0] += 1e-6
    with pytest.raises(ValueError, match=r"w\.npz was changed after it was written; install"):
        Network.load(rewritten(tmp_path / "w.npz", w2=changed))


def test_a_newer_format_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    newer = rewritten(tmp_path / "w.npz", format=np.array(FORMAT + 1))
    with pytest.raises(ValueError, match=rf"format {FORMAT + 1}, newer .* upgrade"):
        Network.load(newer)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no weights"])
def test_something_else_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"holds no weights of a forecaster"):
        Network.load(path)


def test_half_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    path.write_bytes(WEIGHTS.read_bytes()[: WEIGHTS.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"holds no weights of a forecaster"):
        Network.load(path)


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    bad = rewritten(tmp_path / "w.npz", names=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="holds no weights of a forecaster"):
        Network.load(bad)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.npz"):
        Network.load(tmp_path / "nowhere.npz")


def test_weights_are_read_again_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    network_of().save(path)
    assert network_of(str(path)).prices == network_of(path).prices == network_of().prices
    prices = {"safe": 0.01, "balanced": 0.02, "fast": 0.03}
    network_of().settled(prices, (1.0, 0.0)).save(path)
    assert network_of(path).prices == prices


@pytest.mark.parametrize("weights", [3, "", [], {}])
def test_weights_that_are_no_path(weights: object) -> None:
    with pytest.raises(TypeError, match="weights must be the path of a file or None, got"):
        network_of(weights)  # type: ignore[arg-type]
