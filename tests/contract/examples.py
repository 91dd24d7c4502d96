"""Arguments for callbacks that cannot be built without any, by class name."""

from __future__ import annotations

from typing import Any

LIGHTNING: dict[str, dict[str, Any]] = {"PredictiveEarlyStopping": {"monitor": "val_loss"}}
KERAS: dict[str, dict[str, Any]] = {"PredictiveEarlyStopping": {"monitor": "loss"}}
