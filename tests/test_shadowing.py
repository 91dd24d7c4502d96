"""A user's own `strategies` beside their script must be named, not half used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ADAPTERS = ("lightning_ext", "keras_ext")

_SCRIPT = """\
import json, sys
{before}
if __name__ == "__main__":
    try:
        {statement}
    except ImportError as error:
        print(json.dumps([str(error), error.name, error.path]))
    else:
        print(json.dumps(sys.modules["strategies"].__file__))
else:
    print("ran twice")
"""


def run_script(
    script: Path, statement: str, before: str = "", ours: Path = ROOT
) -> list[str] | str:
    """What a user's script prints that does `statement`, with our packages on the path."""
    script.write_text(_SCRIPT.format(before=before, statement=statement))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(ours)},
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    result: list[str] | str = json.loads(done.stdout)
    return result


def assert_names(result: list[str] | str, adapter: str, shadow: Path) -> None:
    assert isinstance(result, list), f"imported in spite of {shadow}"
    message, name, path = result
    assert message.startswith(f"{adapter} needs the 'strategies' package of lightning-keras-ext")
    assert str(shadow) in message
    assert "Rename" in message
    assert "start Python from another folder" in message
    assert (name, path) == ("strategies", str(shadow))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_unshadowed_import_takes_ours(adapter: str, tmp_path: Path) -> None:
    result = run_script(tmp_path / "train.py", f"import {adapter}")
    assert result == str(ROOT / "strategies" / "__init__.py")


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("shadow", ["strategies.py", "strategies/__init__.py"])
@pytest.mark.parametrize("before", ["", "import strategies"])
def test_module_or_package_beside_the_script(
    adapter: str, shadow: str, before: str, tmp_path: Path
) -> None:
    file = tmp_path / shadow
    file.parent.mkdir(exist_ok=True)
    file.write_text("MINE = 1\n")
    result = run_script(tmp_path / "train.py", f"import {adapter}", before)
    assert_names(result, adapter, file)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_script_itself_is_the_shadow_and_does_not_run_twice(
    adapter: str, tmp_path: Path
) -> None:
    script = tmp_path / "strategies.py"
    result = run_script(script, f"from {adapter} import LayerwiseLRDecay")
    assert_names(result, adapter, script)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_folder_without_init_does_not_shadow_an_ordinary_install(
    adapter: str, tmp_path: Path
) -> None:
    (tmp_path / "strategies").mkdir()
    result = run_script(tmp_path / "train.py", f"import {adapter}")
    assert result == str(ROOT / "strategies" / "__init__.py")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_folder_without_init_shadows_an_editable_install(adapter: str, tmp_path: Path) -> None:
    # An editable install is found by a finder that comes after the path, where the user's
    # folder is already taken for a namespace package.
    (tmp_path / "strategies").mkdir()
    only_adapter = tmp_path / "site"
    only_adapter.mkdir()
    (only_adapter / adapter).symlink_to(ROOT / adapter, target_is_directory=True)
    result = run_script(tmp_path / "train.py", f"import {adapter}", ours=only_adapter)
    assert_names(result, adapter, tmp_path / "strategies")


def test_augment_is_checked_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "augment.py").write_text("raise SystemExit('the user code ran')\n")
    for adapter in ADAPTERS:
        statement = f"from {adapter}._shadow import require_ours; require_ours('augment')"
        message = run_script(tmp_path / "train.py", statement)[0]
        assert str(tmp_path / "augment.py") in message
        assert "my_augment" in message


def test_both_adapters_hold_the_same_lines() -> None:
    ours, theirs = (
        (ROOT / adapter / "_shadow.py").read_text().replace("lightning_ext", "keras_ext")
        for adapter in ADAPTERS
    )
    assert ours == theirs
