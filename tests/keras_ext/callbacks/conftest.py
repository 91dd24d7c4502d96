"""Early stopping that does not depend on what the shipped network thinks of a curve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keras_ext.callbacks.early_stopping as module
from strategies.early_stopping import PredictiveStopping
from strategies.early_stopping.rule import Verdict


class EagerRule(PredictiveStopping):
    """Would stop after the third evaluation, and after each that follows."""

    def judge(self, view: Any, y: Any) -> Verdict:
        never = np.zeros(len(view.at), bool)
        gain = ~(view.budget <= view.at) & (view.at >= 3)
        return Verdict(diverged=never, target=never, gain=gain, flat=never, patience=never)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PredictiveStopping", EagerRule)
