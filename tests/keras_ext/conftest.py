"""Keras keeps settings for the whole process; every test starts from the same ones."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest


@pytest.fixture(autouse=True)
def fresh_keras() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")
