"""What a figure depends on besides the code, and how results are written."""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
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


def dumps(results: dict[str, Any]) -> str:
    """JSON with every list of numbers on one line."""
    text = json.dumps(results, indent=1)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"
