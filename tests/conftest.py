"""What all tests share: the `matrix` marker."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("LKX_MATRIX", "0") not in ("", "0"):
        return
    skip = pytest.mark.skip(reason="full matrix only: set LKX_MATRIX=1 or run `make matrix`")
    for item in items:
        if item.get_closest_marker("matrix"):
            item.add_marker(skip)
