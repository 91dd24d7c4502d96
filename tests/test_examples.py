"""The demonstration runs all examples, as `make demo` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = {"early_stopping.png", "gradient_checkpointing.png", "layerwise_lr_decay.png"}


def test_the_demonstration(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "demo_output").iterdir()} == PICTURES
    for framework in ("Lightning", "Keras"):
        assert f"Decided in {framework}:" in done.stdout
    assert done.stdout.count("stopping saves") == 2
    assert "The first process holds" in done.stdout
    assert "weights are those of the plain run, bit for bit: True" in done.stdout
    assert "its weights differ from those of the plain run by 0.0e+00" in done.stdout


def test_every_example_is_in_the_demonstration() -> None:
    demo = (ROOT / "examples" / "demo.py").read_text()
    stems = {path.stem for path in (ROOT / "examples").glob("*_*.py")} - {"__init__"}
    assert {stem for stem in stems if f"{stem}.run()" not in demo} == set()
