"""What a figure depends on besides the code, and how results are written."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "lightning", "keras", "tensorflow", "jax", "scikit-learn", "numpy")


def setting() -> dict[str, Any]:
    """Date, machine, load and versions."""
    versions = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "threads": 1,
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": versions,
    }


def arguments_of(description: str) -> argparse.ArgumentParser:
    """A command line with what all benchmarks take: `--quick` and `--out`."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run, for no figure")
    parser.add_argument(
        "--out", type=Path, help="folder for the results; a quick run without it only prints them"
    )
    return parser


def write(results: dict[str, Any], page: str, out: Path | None, name: str) -> None:
    """Print the page, and write it with the raw data if there is a folder."""
    print(page)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(dumps(results))
        (out / f"{name}.md").write_text(page)


def dumps(results: dict[str, Any]) -> str:
    """JSON with every list of numbers on one line."""
    text = json.dumps(results, indent=1)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"
