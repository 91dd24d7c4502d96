"""The command line: weights made from data to file, and presets set by one's own runs."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from strategies.early_stopping import forecast, stopping_epoch
from strategies.early_stopping.network import Network, network_of
from strategies.early_stopping.train.__main__ import main
from strategies.early_stopping.train.curves import usable
from strategies.early_stopping.train.evaluate import REGRETS, Seen, calibration
from strategies.early_stopping.train.folder import read_folder
from strategies.early_stopping.train.replay import Replay
from strategies.early_stopping.train.trainer import simulated_curves
from tests.strategies.early_stopping.curves import falling, overfitting


def write_folder(folder: Path, runs: int) -> Path:
    for i in range(runs):
        values = overfitting(40, turn=8 + i, seed=i)
        lines = ["epoch,val_loss,loss", *(f"{e},{v},{v / 2}" for e, v in enumerate(values))]
        path = folder / f"project {i % 4}" / f"run {i}"
        path.mkdir(parents=True)
        (path / "metrics.csv").write_text("\n".join(lines))
    return folder


def write_data(folder: Path) -> Path:
    head = ["curve", "kind", "group", "licence", "metric", "mode", "epoch", "value", "train_loss"]
    for name, count in (("dev", 25), ("permissive", 10)):
        with gzip.open(folder / f"{name}.csv.gz", "wt", newline="") as file:
            table = csv.writer(file)
            table.writerow(head)
            for i in range(count):
                values = overfitting(30, turn=5 + i % 20, seed=i)
                fixed = [i, "keras_other", f"{name} {i % 6}", "MIT", "val_loss", "min"]
                table.writerows([*fixed, e, v, ""] for e, v in enumerate(values))
    curves = [falling(20, 0.01, seed=i) for i in range(6)]
    flat = np.concatenate(curves).astype(np.float32)
    np.savez(
        folder / "bulk_apache.npz",
        value=flat,
        train_loss=flat,
        step=flat,
        offset=np.arange(7) * 20,
        task=np.array([f"task {i % 2}" for i in range(6)]),
        metric=np.array(["valid_loss"] * 6),
        mode=np.array(["min"] * 6),
    )
    return folder


def test_presets_are_set_by_ones_own_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder, out = write_folder(tmp_path / "runs", 24), tmp_path / "own.npz"
    main(["--folder", str(folder), "--out", str(out)])
    own = Network.load(out)
    assert own.prices != network_of().prices
    curves = usable(read_folder(folder))
    for preset, regret in REGRETS.items():
        stops = [stopping_epoch(c.values, "max", 40, preset, weights=str(out)) for c in curves]
        replayed = Replay.of(curves, [stop or 40 for stop in stops])
        assert replayed.regret.mean() <= regret + 0.003
    raw = network_of().settled(network_of().prices, (1.0, 0.0))
    expected = calibration([Seen.of(raw, c, train=False) for c in curves])
    assert own._arrays["calibration"].tolist() == pytest.approx(expected)
    assert "judged on 24 curves" in capsys.readouterr().out
    values = overfitting(40, turn=10)
    assert forecast(values, "min", 60, weights=str(out)).p_improve < 0.5
    assert stopping_epoch(values, "min", 40, weights=str(out)) is not None


@pytest.mark.parametrize("arguments", ["--out own.npz", "--folder runs"])
def test_what_must_be_given(arguments: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert "--out" in capsys.readouterr().err


def test_too_few_runs(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, 3)
    with pytest.raises(SystemExit, match=r"holds 3 curves .* at least 20 are needed"):
        main(["--folder", str(folder), "--out", str(tmp_path / "own.npz")])


def test_from_data_to_file_the_same_each_time(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    files = [tmp_path / name for name in ("a.npz", "b.npz")]
    for out in files:
        options = f"--data {data} --out {out} --simulated 0 --steps 3 --workers 1"
        main(options.split())
    a, b = (Network.load(out) for out in files)
    assert a.prices == b.prices
    values = falling(20)
    seen = [forecast(values, "min", 40, weights=str(out)) for out in files]
    assert seen[0] == seen[1]
    assert a.names == network_of().names


def test_simulated_curves_are_of_the_kind_that_training_takes() -> None:
    curves = simulated_curves(30)
    assert 20 <= len(curves) <= 30  # some never leave their first value
    assert {c.kind for c in curves} == {"simulated"}
    assert all(c.free and c.group.startswith("simulated/") for c in curves)
    assert all(c.train is not None for c in curves)
