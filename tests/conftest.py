"""What all tests share: the `matrix` marker, and no deadline for drawn examples."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("project", deadline=None)
settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("LKX_MATRIX", "0") not in ("", "0"):
        return
    skip = pytest.mark.skip(reason="full matrix only: set LKX_MATRIX=1 or run `make matrix`")
    for item in items:
        if item.get_closest_marker("matrix"):
            item.add_marker(skip)
