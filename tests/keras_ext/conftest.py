"""Keras keeps settings for the whole process; every test starts from the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import keras
import pytest


@pytest.fixture(autouse=True)
def fresh_keras() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def fast_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.compile` trace as always, but not write and compile C++, which takes minutes."""
    if keras.backend.backend() == "torch":
        import torch

        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
