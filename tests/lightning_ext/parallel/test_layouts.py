"""Every layout of four and of eight ranks is one process; only in the full matrix."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.lightning_ext.parallel.cases import ACCUMULATED, EIGHT, FULL
from tests.lightning_ext.parallel.compare import check, read, run

# The first test waits for all that its ranks run.
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(2700)]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("four"), FULL, timeout=2600)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("eight"), EIGHT, world=8, timeout=2600)


@pytest.mark.parametrize("name", list(FULL))
def test_four(name: str, four: Path) -> None:
    check(FULL[name], read(four, name))


@pytest.mark.parametrize("name", list(EIGHT))
def test_eight(name: str, eight: Path) -> None:
    check(EIGHT[name], read(eight, name))


def test_batches_taken_together_are_one_batch(four: Path) -> None:
    found = [read(four, name)["state"] for name in ACCUMULATED]
    for one, other in pairwise(found):
        for name, value in one.items():
            # Biases of the keys (a third of these) are noise.
            limit = 1e-9 if name.endswith("c_attn.bias") else 1e-10
            assert (other[name] - value).abs().max() < limit, name


def test_seven_parts_are_balanced(four: Path) -> None:
    # One block each, as two are dearer than a block with its neighbours: embedding, norm and head.
    assert read(four, "seven parts")["parts"] == [2, 1, 1, 3]
