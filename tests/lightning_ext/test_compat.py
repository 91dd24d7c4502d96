"""Which of Lightning's two packages `lightning_ext` builds on, in fresh interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

_STUB = {
    "__init__.py": "class Callback: ...\nclass LightningModule: ...\nclass Trainer: ...\n",
    "utilities.py": "def rank_zero_info(*args): ...\ndef rank_zero_warn(*args): ...\n",
    "strategies.py": "class ParallelStrategy: ...\n",
    "callbacks.py": "class EarlyStopping: ...\nclass LearningRateMonitor: ...\n",
}
_FOLDERS = {"lightning": "lightning/pytorch", "pytorch_lightning": "pytorch_lightning"}


def run(code: str, path: Sequence[Path] = (), flags: Sequence[str] = ()) -> Any:
    """What `code` prints as JSON in its last line, run by a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_with_stubs(code: str, installed: Sequence[str], folder: Path) -> Any:
    """Run `code` where exactly the `installed` packages exist, as stand-ins that load at once."""
    for package in installed:
        inner = folder / _FOLDERS[package]
        inner.mkdir(parents=True)
        (folder / package / "__init__.py").touch()
        for name, text in _STUB.items():
            (inner / name).write_text(text)
    return run(code, [folder], flags=["-S"])  # -S: without the real ones in site-packages


BOTH = ("lightning", "pytorch_lightning")


@pytest.mark.parametrize(
    ("installed", "first", "expected"),
    [
        (BOTH, "pass", "lightning.pytorch"),
        (BOTH, "import pytorch_lightning", "pytorch_lightning"),
        (BOTH, "import lightning.pytorch", "lightning.pytorch"),
        (BOTH, "import pytorch_lightning, lightning.pytorch", "lightning.pytorch"),
        (BOTH, "sys.modules['lightning.pytorch'] = None; import pytorch_lightning",
         "pytorch_lightning"),
        (("pytorch_lightning",), "pass", "pytorch_lightning"),
        (("lightning",), "pass", "lightning.pytorch"),
    ],
)  # fmt: skip
def test_choice(installed: Sequence[str], first: str, expected: str, tmp_path: Path) -> None:
    code = f"""
import json, sys
{first}
from lightning_ext import _compat
print(json.dumps([_compat.pl.__name__] + [
    getattr(_compat, name).__module__ for name in ("Callback", "LightningModule", "Trainer")
] + [_compat.rank_zero_warn.__module__]))
"""
    found = run_with_stubs(code, installed, tmp_path)
    assert found == [expected] * 4 + [f"{expected}.utilities"]


def test_only_the_chosen_package_is_loaded(tmp_path: Path) -> None:
    code = """
import json, sys
import pytorch_lightning
import lightning_ext._compat
print(json.dumps("lightning" in sys.modules))
"""
    assert run_with_stubs(code, BOTH, tmp_path) is False


def test_without_lightning_the_error_names_the_extra(tmp_path: Path) -> None:
    code = """
import json
try:
    import lightning_ext._compat
except ImportError as error:
    print(json.dumps([str(error), error.name]))
"""
    message, name = run_with_stubs(code, (), tmp_path)
    assert "pip install 'lightning-keras-ext[lightning]'" in message
    assert name == "lightning"


def test_classes_of_either_package_are_recognised(tmp_path: Path) -> None:
    code = """
import json
from lightning_ext._compat import is_lightning_class
path, found = "callbacks.LearningRateMonitor", []
import pytorch_lightning.callbacks
theirs = pytorch_lightning.callbacks.LearningRateMonitor()
found.append(is_lightning_class(theirs, path))
import lightning.pytorch.callbacks
ours = lightning.pytorch.callbacks.LearningRateMonitor()
found += [is_lightning_class(x, path) for x in (theirs, ours, object())]
print(json.dumps(found))
"""
    assert run_with_stubs(code, BOTH, tmp_path) == [True, True, True, False]


def test_is_lightning_class_before_the_class_is_imported(tmp_path: Path) -> None:
    code = """
import json
from lightning_ext._compat import is_lightning_class
print(json.dumps(is_lightning_class(object(), "callbacks.LearningRateMonitor")))
"""
    assert run_with_stubs(code, BOTH, tmp_path) is False


_REAL = """
import json, sys
{first}
import lightning_ext.callbacks as ours
bases = {{}}
for name in ours.__all__:
    mro = getattr(ours, name).__mro__
    bases[name] = sorted(
        cls.__module__.partition(".")[0] for cls in mro if cls.__name__ == "Callback"
    )
print(json.dumps([bases, "lightning" in sys.modules]))
"""


@pytest.mark.parametrize(
    ("first", "expected", "lightning_loaded"),
    [
        ("import pytorch_lightning", "pytorch_lightning", False),
        ("import lightning, pytorch_lightning", "lightning", True),
    ],
)
def test_callbacks_derive_from_the_package_in_use(
    first: str, expected: str, lightning_loaded: bool
) -> None:
    bases, loaded = run(_REAL.format(first=first))
    assert bases
    assert set(map(tuple, bases.values())) == {(expected,)}
    assert loaded is lightning_loaded
