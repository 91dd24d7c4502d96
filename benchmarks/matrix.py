"""The table of the full test matrix, from the JUnit files that the test groups left.

python -m benchmarks.matrix build/junit benchmarks/results/matrix.md
"""

from __future__ import annotations

import platform
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = {
    "core": ("torch", "lightning", "pytorch-lightning"),
    "keras-tensorflow": ("keras", "tensorflow"),
    "keras-torch": ("keras", "torch"),
    "keras-jax": ("keras", "jax"),
}


@dataclass(frozen=True)
class Group:
    """What one test group came to; `None` counts mean that it left no result."""

    name: str
    passed: int | None = None
    failed: int | None = None
    skipped: int | None = None
    seconds: float | None = None


def read_group(name: str, folder: Path) -> Group:
    """Count the tests in a group's JUnit file."""
    file = folder / f"{name}.xml"
    if not file.exists():
        return Group(name)
    suites = list(ET.parse(file).getroot().iter("testsuite"))

    def total(key: str) -> int:
        return sum(int(suite.get(key, 0)) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    seconds = sum(float(suite.get("time", 0.0)) for suite in suites)
    return Group(name, total("tests") - failed - skipped, failed, skipped, seconds)


def installed(packages: Sequence[str]) -> str:
    """Names and versions of those packages that are installed."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def table(groups: Sequence[Group]) -> str:
    """The groups as a Markdown table."""
    lines = [
        "| group | passed | failed | skipped | seconds | versions |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for group in groups:
        counts = (group.passed, group.failed, group.skipped)
        cells = ["no result" if count is None else str(count) for count in counts]
        cells.append("" if group.seconds is None else f"{group.seconds:.0f}")
        versions = installed(_PACKAGES.get(group.name, ()))
        lines.append(f"| {group.name} | {' | '.join(cells)} | {versions} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Write the table; 1 where a group failed or passed no test, else 0."""
    folder, target = map(Path, arguments)
    groups = [read_group(name, folder) for name in _PACKAGES]
    heading = f"Full test matrix (`make matrix`), Python {platform.python_version()}."
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"{heading}\n\n{table(groups)}\n")
    print(table(groups))
    return int(any(group.failed or not group.passed for group in groups))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
