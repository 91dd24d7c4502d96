"""Private names of frameworks are used in three places alone, and all are documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BACKENDS = ROOT / "keras_ext" / "backends"
COMPAT = {ROOT / "lightning_ext" / name for name in ("_compat.py", "_torch.py")}

_PRIVATE = re.compile(r"_[A-Za-z]\w*")


def own_names(tree: ast.AST) -> set[str]:
    """Private names that a module itself defines: on `self`, as a function, class or variable."""
    own = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                own.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
    return {name for name in own if _PRIVATE.fullmatch(name)}


def used_names(tree: ast.AST) -> set[str]:
    """Private names that a module reaches for, as an attribute or by a string."""
    used = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                used.add(name)
    return {name for name in used if _PRIVATE.fullmatch(name)}


TREES = {
    path: ast.parse(path.read_text())
    for room in ("keras_ext", "lightning_ext")
    for path in sorted((ROOT / room).rglob("*.py"))
}


def documented() -> list[str]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## Private names of the frameworks")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(_\w+)` \|", section, re.MULTILINE)


@pytest.mark.parametrize(
    "file",
    [path for path in TREES if BACKENDS not in path.parents and path not in COMPAT],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_no_private_name_of_a_framework_elsewhere(file: Path) -> None:
    assert used_names(TREES[file]) - own_names(TREES[file]) == set()


def test_the_table_lists_exactly_what_is_used() -> None:
    used = {
        name
        for path, tree in TREES.items()
        if BACKENDS in path.parents or path in COMPAT
        for name in used_names(tree) - own_names(tree)
    }
    assert documented() == sorted(used)


def test_the_check_sees() -> None:
    tree = ast.parse("self._mine = 1\nx._theirs()\nsetattr(y, '_byname', 2)\nz.public")
    assert used_names(tree) - own_names(tree) == {"_theirs", "_byname"}
