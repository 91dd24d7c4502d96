"""Curves come back from a file as they went in."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from strategies.early_stopping.train.curves import LearningCurve
from strategies.early_stopping.train.store import load_curves, save_curves
from strategies.early_stopping.train.trainer import simulated_curves


def same(a: list[LearningCurve], b: list[LearningCurve]) -> None:
    assert [(c.kind, c.group, c.metric) for c in a] == [(c.kind, c.group, c.metric) for c in b]
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x.values, y.values, rtol=1e-6)
        assert (x.train is None) == (y.train is None)
        if x.train is not None and y.train is not None:
            np.testing.assert_allclose(x.train, y.train, rtol=1e-6)


def test_round_trip(tmp_path: Path) -> None:
    curves = [
        LearningCurve(np.array([1.0, np.nan, 2.0]), None, "a", "one", metric="val_loss"),
        LearningCurve(np.array([3.0]), np.array([0.5]), "b", "two"),
    ]
    save_curves(tmp_path / "curves.npz", curves)
    same(load_curves(tmp_path / "curves.npz"), curves)
    assert [p.name for p in tmp_path.iterdir()] == ["curves.npz"]
    save_curves(tmp_path / "none.npz", [])
    assert load_curves(tmp_path / "none.npz") == []


def test_simulated_curves_are_made_once(tmp_path: Path) -> None:
    made = simulated_curves(20, keep=tmp_path)
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    same(simulated_curves(20, keep=tmp_path), made)
    assert file.stat().st_mtime_ns == before
