"""What is installed: the wheel, its metadata, and that numpy alone is enough for `strategies`."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import strategies

ROOT = Path(__file__).parents[1]
ROOMS = ("augment", "keras_ext", "lightning_ext", "strategies")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without network from a copy that leaves no trace in the tree."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in (*ROOMS, "tests", "examples", "benchmarks", "docs"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*command, str(copy)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


@pytest.fixture(scope="module")
def extras(metadata: Message) -> dict[str, set[str]]:
    """Names of the distributions behind each extra, references to other extras followed."""
    direct: dict[str, list[Requirement]] = {"": []}
    for extra in metadata.get_all("Provides-Extra", []):
        direct[extra] = []
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        for extra in direct:
            if requirement.marker is None:
                if extra == "":
                    direct[extra].append(requirement)
            elif extra and requirement.marker.evaluate({"extra": extra}):
                direct[extra].append(requirement)

    def names(extra: str) -> set[str]:
        found: set[str] = set()
        for requirement in direct[extra]:
            if requirement.name == "lightning-keras-ext":
                found.update(*(names(inner) for inner in requirement.extras))
            else:
                found.add(canonicalize_name(requirement.name))
        return found

    return {extra: names(extra) for extra in direct}


def test_wheel_holds_exactly_our_sources(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {str(path.relative_to(ROOT)) for path in SOURCES}
    data = {"strategies/early_stopping/weights.npz"}
    assert shipped == expected | data | {f"{room}/py.typed" for room in ROOMS}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_every_folder_of_code_is_a_listed_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    folders = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in SOURCES}
    with_init = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for path in SOURCES
        if path.name == "__init__.py"
    }
    assert set(listed) == with_init
    assert folders == with_init, "a folder of code lacks __init__.py"
    assert len(listed) == len(set(listed))


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "lightning-keras-ext"
    assert metadata["Version"] == strategies.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Summary"]


def test_license_is_the_full_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert [f"   {i}. " in text for i in range(1, 10)] == [True] * 9


def test_numpy_is_the_only_base_requirement(extras: dict[str, set[str]]) -> None:
    assert extras[""] == {"numpy"}


def test_extras(extras: dict[str, set[str]]) -> None:
    expected = {
        "lightning": {"torch", "lightning", "torchdata"},
        "pytorch-lightning": {"torch", "pytorch-lightning", "torchdata"},
        "keras": {"keras"},
        "tensorflow": {"keras", "tensorflow"},
        "jax": {"keras", "jax"},
        "augment": {"scikit-learn", "imbalanced-learn", "faiss-cpu", "albumentations"},
        "generative": {"diffusers", "torch"},
        "report": {"rich", "matplotlib"},
    }
    assert {extra: extras[extra] for extra in expected} == expected
    assert extras["all"] == set().union(*expected.values())
    assert extras.keys() == expected.keys() | {"", "all", "dev"}
    assert {"pytest", "mypy", "ruff", "build", "hypothesis", "jsonargparse"} <= extras["dev"]


def test_no_extra_asks_for_torchvision_or_timm(extras: dict[str, set[str]]) -> None:
    assert not {"torchvision", "timm"} & set().union(*extras.values())


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
def test_compromised_releases_are_excluded(name: str, metadata: Message) -> None:
    lines = map(Requirement, metadata.get_all("Requires-Dist", []))
    (requirement,) = [r for r in lines if r.name == name]
    allowed = {v: requirement.specifier.contains(v) for v in ("2.6.1", "2.6.2", "2.6.3", "2.6.4")}
    assert allowed == {"2.6.1": True, "2.6.2": False, "2.6.3": False, "2.6.4": True}


def test_constraints_pin_one_version_each_within_the_bounds(metadata: Message) -> None:
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line)
        assert match, f"not a plain pin: {line!r}"
        name = canonicalize_name(match[1])
        assert name not in pins
        pins[name] = match[2]
    assert not {"torchvision", "timm"} & pins.keys()
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name != "lightning-keras-ext":
            assert name in pins, f"{name} is required, but constraints.txt does not pin it"
            assert requirement.specifier.contains(pins[name]), f"{name}: pin outside bounds"


def test_setup_cfg_holds_the_metadata_and_pyproject_none() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert pyproject.keys() == {"build-system", "tool"}
    assert pyproject["tool"].keys() == {"ruff"}


@pytest.fixture
def bare_site(wheel: zipfile.ZipFile, tmp_path: Path) -> Path:
    """A folder with the unpacked wheel and numpy, as in a new environment."""
    wheel.extractall(tmp_path)
    installed = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (installed / name).exists():
            (tmp_path / name).symlink_to(installed / name, target_is_directory=True)
    return tmp_path


def run_bare(code: str, site: Path) -> str:
    """Run code with the standard library and `site` on the path, and nothing else."""
    prologue = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", prologue + code],
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_strategies_works_with_numpy_alone(bare_site: Path) -> None:
    code = """
import importlib, io, pkgutil
for name in ("torch", "keras", "rich"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} can be imported: this environment is not bare")
import strategies
for module in pkgutil.walk_packages(strategies.__path__, "strategies."):
    importlib.import_module(module.name)
import numpy
from strategies.report import print_decisions
from strategies.learning_rate import layerwise_multipliers
log = strategies.DecisionLog("Rates")
log.record(numpy.int64(3), "set rates", "two levels")
print_decisions(log)
print(layerwise_multipliers(["stem.weight", "head.weight"], decay=0.5))
print(strategies.__file__)
"""
    lines = run_bare(code, bare_site).splitlines()
    assert lines[1].split() == ["3", "Rates", "set", "rates", "two", "levels"]
    assert lines[2] == "{'stem.weight': 0.5, 'head.weight': 1.0}"
    assert lines[3] == str(bare_site / "strategies" / "__init__.py")


@pytest.mark.parametrize("room", ["lightning_ext", "keras_ext", "augment"])
def test_the_other_packages_import_with_numpy_alone(room: str, bare_site: Path) -> None:
    code = f"import {room}; print({room}.__all__)"
    assert run_bare(code, bare_site).strip() == str(__import__(room).__all__)
