"""The `matrix` marker, and the table that `make matrix` writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import matrix

ROOT = Path(__file__).parents[1]

_TESTS = """\
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken(): raise RuntimeError
def test_error(broken): pass
@pytest.mark.parametrize("n", range(3))
def test_many(n): pass
@pytest.mark.matrix
def test_matrix(): pass
"""


def run_group(folder: Path, name: str, **environment: str) -> matrix.Group:
    """Run a small suite under the project's own conftest and read its result."""
    suite = folder / "suite"
    suite.mkdir(exist_ok=True)
    (suite / "test_small.py").write_text(_TESTS)
    (suite / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (suite / "pytest.ini").write_text("[pytest]\nmarkers = matrix\n")
    junit = f"--junitxml={folder / name}.xml"
    kept = {key: value for key, value in os.environ.items() if key != "LKX_MATRIX"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", junit, str(suite)],
        env=kept | environment,
        cwd=suite,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout
    return matrix.read_group(name, folder)


@pytest.mark.parametrize(
    ("environment", "passed", "skipped"),
    [({}, 4, 2), ({"LKX_MATRIX": "0"}, 4, 2), ({"LKX_MATRIX": "1"}, 5, 1)],
)
def test_marker_and_counts(
    environment: dict[str, str], passed: int, skipped: int, tmp_path: Path
) -> None:
    group = run_group(tmp_path, "core", **environment)
    assert (group.passed, group.failed, group.skipped) == (passed, 2, skipped)
    assert group.seconds is not None
    assert 0 < group.seconds < 60


def test_a_group_without_result_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "results" / "matrix.md"
    assert matrix.main([str(tmp_path), str(target)]) == 1
    rows = [line for line in target.read_text().splitlines() if "no result" in line]
    assert [row.split()[1] for row in rows] == [
        "core",
        "keras-tensorflow",
        "keras-torch",
        "keras-jax",
    ]
    assert "no result" in capsys.readouterr().out


@pytest.mark.parametrize(("failures", "code"), [(0, 0), (1, 1), (7, 1)])
def test_table_and_exit_code(failures: int, code: int, tmp_path: Path) -> None:
    for name in ("core", "keras-tensorflow", "keras-torch", "keras-jax"):
        (tmp_path / f"{name}.xml").write_text(
            f'<testsuites><testsuite tests="9" failures="{failures}" errors="0" skipped="2" '
            'time="61.4"/></testsuites>'
        )
    target = tmp_path / "matrix.md"
    assert matrix.main([str(tmp_path), str(target)]) == code
    text = target.read_text()
    assert text.count(f"| {7 - failures} | {failures} | 2 | 61 |") == 4


def test_versions_of_what_is_installed() -> None:
    found = matrix.installed(["numpy", "no-such-package"])
    assert found == f"numpy {np.__version__}"


def test_no_passed_test_is_a_failure(tmp_path: Path) -> None:
    for name in ("core", "keras-tensorflow", "keras-torch", "keras-jax"):
        (tmp_path / f"{name}.xml").write_text('<testsuite tests="2" skipped="2" time="1"/>')
    assert matrix.main([str(tmp_path), str(tmp_path / "matrix.md")]) == 1


def test_the_table_covers_the_makefiles_groups() -> None:
    # Under `make test` the outer make's flags would reach this one.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    make = subprocess.run(
        ["make", "--dry-run", "test"],
        env=kept,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in ("core", "keras-tensorflow", "keras-torch", "keras-jax"):
        assert f"--junitxml=build/junit/{name}.xml" in make.stdout
    assert make.stdout.count("--junitxml=") == 4
