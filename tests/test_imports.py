"""Who imports what: read from the sources, and observed in fresh interpreters."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("augment", "keras_ext", "lightning_ext", "strategies")
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
FRAMEWORKS = LIGHTNING | {
    "torch", "keras", "tf_keras", "tensorflow", "jax", "sklearn", "matplotlib", "rich", "pandas",
}  # fmt: skip

# Third-party packages that a room's modules may import anywhere.
ALLOWED = {
    "strategies": {"numpy"},
    "augment": {"numpy", "sklearn", "imblearn", "albumentations", "torch", "diffusers", "faiss"},
    "lightning_ext": {"numpy", "torch", "torchdata"},
    "keras_ext": {"numpy", "keras"},
}
ALLOWED_ROOMS = {
    "strategies": set(),
    "augment": {"strategies"},
    "lightning_ext": {"strategies", "augment"},
    "keras_ext": {"strategies", "augment"},
}
# Modules and folders of `strategies` that may import more, inside functions.
WHEN_CALLED = {"train", "plot", "report"}


@dataclass(frozen=True)
class Import:
    """One imported module, `names` being what a `from` import takes out of it."""

    file: Path
    line: int
    module: str
    names: tuple[str, ...]
    in_function: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        what = f"{self.module}: {', '.join(self.names)}" if self.names else self.module
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {what}"


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(file: Path) -> list[Import]:
    return list(_imports(file, ast.parse(file.read_text()), in_function=False))


def _imports(file: Path, node: ast.AST, in_function: bool) -> Iterator[Import]:
    for module, names in _modules(file, node):
        yield Import(file, getattr(node, "lineno", 0), module, names, in_function)
    in_function = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    for child in ast.iter_child_nodes(node):
        yield from _imports(file, child, in_function)


def _modules(file: Path, node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    match node:
        case ast.Import(names=aliases):
            yield from ((alias.name, ()) for alias in aliases)
        case ast.ImportFrom(module=module, names=aliases, level=level):
            if level:
                package = file.relative_to(ROOT).parent.parts
                base = package[: len(package) - level + 1]
                module = ".".join([*base, *([module] if module else [])])
            yield str(module), tuple(alias.name for alias in aliases)
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            if called in ("import_module", "__import__", "importorskip"):
                yield name, ()


def foreign(room: str) -> list[Import]:
    """Imports of a room that lead out of it and out of the standard library."""
    return [
        found
        for file in sources(room)
        for found in imports(file)
        if found.top not in sys.stdlib_module_names | {room}
    ]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def allowed(room: str, found: Import) -> bool:
    if found.top in ALLOWED[room] | ALLOWED_ROOMS[room]:
        return True
    inside = found.file.relative_to(ROOT / room)
    match room:
        case "strategies":
            extra = {"torch", "sklearn", "matplotlib", "rich", "tensorboard"}
            named = WHEN_CALLED & {*inside.with_suffix("").parts}
            return bool(named) and found.in_function and found.top in extra
        case "augment":
            return inside.parts[0] == "generative" and found.in_function and found.top in LIGHTNING
        case "lightning_ext":
            return inside == Path("_compat.py") and found.top in LIGHTNING | {"torchmetrics"}
        case _:
            return inside.parts[0] == "backends" and found.top in {"tensorflow", "torch", "jax"}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_the_design_allows(room: str) -> None:
    assert [str(found) for found in foreign(room) if not allowed(room, found)] == []


def test_only_compat_names_lightning() -> None:
    files = {found.file for found in foreign("lightning_ext") if found.top in LIGHTNING}
    assert files == {ROOT / "lightning_ext" / "_compat.py"}


def private_uses(file: Path) -> Iterator[str]:
    """Private names of another room of ours that a file imports or reaches through a module."""
    here = file.relative_to(ROOT).parts[0]
    bound = set()
    for found in imports(file):
        if found.top not in ROOMS or found.top == here:
            continue
        if any(map(is_private, [*found.module.split("."), *found.names])):
            yield str(found)
        bound |= {found.top, *found.names}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            value = node.value
            while isinstance(value, ast.Attribute):
                value = value.value
            if isinstance(value, ast.Name) and value.id in bound:
                yield f"{file.relative_to(ROOT)}:{node.lineno} uses {ast.unparse(node)}"


def test_no_room_uses_anothers_private_names() -> None:
    files = sources(*ROOMS, "examples", "benchmarks")
    assert [use for file in files for use in private_uses(file)] == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("from strategies._x import y", 1),
        ("from strategies.report import _plain_table", 1),
        ("import strategies._x", 1),
        ("import strategies.report\nstrategies.report._plain_table([])", 1),
        ("from strategies import report\nreport._plain_table([])", 1),
        ("def f():\n    from importlib import import_module\n    import_module('augment._x')", 1),
        ("from strategies import __version__\nimport keras_ext._shadow", 0),
        ("self._x = 1\nfrom strategies.report import print_decisions", 0),
    ],
)
def test_the_private_name_check_sees(
    code: str, count: int, monkeypatch: Any, tmp_path: Any
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "keras_ext" / "module.py"
    file.parent.mkdir()
    file.write_text(code)
    assert len(list(private_uses(file))) == count


_OBSERVE = """
import importlib, json, pkgutil, sys
start = set(sys.modules)
room = {room!r}
package = importlib.import_module(room)
bare = set(sys.modules) - start
missing, packages = [], {{}}
names = [room] + [m.name for m in pkgutil.walk_packages(package.__path__, room + ".")]
for name in names:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None)
    if hasattr(module, "__path__"):
        packages[name] = public
    missing += [f"{{name}}.{{item}}" for item in public or () if not hasattr(module, item)]
    missing += [f"dir({{name}}): {{item}}" for item in public or () if item not in dir(module)]
print(json.dumps([sorted(bare), sorted(set(sys.modules) - start), missing, packages]))
"""


@dataclass(frozen=True)
class Observed:
    """What importing a room in a fresh interpreter led to."""

    bare: set[str]
    everything: set[str]
    missing: list[str]
    packages: dict[str, list[str] | None]


def tops(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.fixture(scope="module")
def observed() -> Any:
    cache: dict[str, Observed] = {}

    def observe(room: str) -> Observed:
        if room not in cache:
            done = subprocess.run(
                [sys.executable, "-c", _OBSERVE.format(room=room)],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, done.stderr
            bare, everything, missing, packages = json.loads(done.stdout.splitlines()[-1])
            cache[room] = Observed(set(bare), set(everything), missing, packages)
        return cache[room]

    return observe


@pytest.mark.parametrize(
    ("room", "never"),
    [
        ("strategies", FRAMEWORKS),
        ("augment", LIGHTNING | {"keras", "tensorflow", "lightning_ext", "keras_ext"}),
        ("lightning_ext", {"keras", "tf_keras", "tensorflow", "keras_ext"}),
        ("keras_ext", LIGHTNING | {"lightning_ext"}),
    ],
)
def test_all_modules_of_a_room_never_load(room: str, never: set[str], observed: Any) -> None:
    result = observed(room)
    files = {str(f.relative_to(ROOT).with_suffix("")).replace("/", ".") for f in sources(room)}
    assert {name.removesuffix(".__init__") for name in files} <= result.everything
    assert tops(result.everything) & never == set()


@pytest.mark.parametrize("room", ["lightning_ext", "keras_ext"])
def test_an_adapter_itself_loads_nothing_but_strategies(room: str, observed: Any) -> None:
    loaded = tops(observed(room).bare) - sys.stdlib_module_names
    assert loaded <= {room, "strategies", "numpy"}


def test_lightning_is_the_package_taken_when_neither_is_loaded(observed: Any) -> None:
    loaded = tops(observed("lightning_ext").everything)
    assert "lightning" in loaded
    assert "pytorch_lightning" not in loaded


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_resolves(room: str, observed: Any) -> None:
    result = observed(room)
    assert result.packages[room] is not None
    assert result.missing == []


@pytest.mark.parametrize("room", ["lightning_ext", "keras_ext"])
def test_all_is_complete(room: str, observed: Any) -> None:
    package = importlib.import_module(room)
    assert set(package.__all__) == {*package._HOME, "__version__"}
    callbacks = observed(room).packages[f"{room}.callbacks"]
    assert callbacks
    assert {name: package._HOME.get(name) for name in callbacks} == dict.fromkeys(
        callbacks, f"{room}.callbacks"
    )
    # Type checkers see the lazy names only through this block.
    declared = {
        name: found.module
        for found in imports(ROOT / room / "__init__.py")
        for name in found.names
        if found.top == room and not is_private(found.module.rpartition(".")[2])
    }
    assert declared == package._HOME


@pytest.mark.parametrize(
    "file", [f for f in sources(*ROOMS) if f.name == "__init__.py"], ids=lambda f: f.parent.name
)
def test_a_package_lists_what_it_imports_from_its_modules(file: Path) -> None:
    package = ".".join(file.relative_to(ROOT).parent.parts)
    taken = {
        name
        for found in imports(file)
        for name in found.names
        if found.module.startswith(f"{package}.") and not is_private(found.module.split(".")[-1])
    }
    tree = ast.parse(file.read_text())
    public = [
        name
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and node.value is not None
        and "__all__" in ast.unparse(node).partition("=")[0]
        for name in ast.literal_eval(node.value)
    ]
    assert taken <= set(public)
    assert len(public) == len(set(public))


def test_an_unknown_name_raises_attribute_error() -> None:
    for room in ("lightning_ext", "keras_ext"):
        with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'Nothing'"):
            importlib.import_module(room).Nothing  # noqa: B018
