"""Memory of whole processes, as the system sees it."""

from __future__ import annotations

import pytest

from benchmarks._gradient_checkpointing_keras import measured
from tests.keras_ext.helpers import BACKEND


@pytest.mark.matrix  # two processes of ten seconds each
@pytest.mark.skipif(BACKEND == "jax", reason="XLA on a CPU merges what is run again")
def test_a_process_takes_a_quarter_less() -> None:
    plain, ours = (measured(BACKEND, method, False, 1) for method in ("plain", "ours 0.3"))
    assert ours["peak"] <= 0.75 * plain["peak"]
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-6)
