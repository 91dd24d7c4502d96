"""Which of several processes speaks for all."""

from __future__ import annotations

import os
import sys

import keras


def is_first_rank() -> bool:
    """Whether this is the only process of a run, or the first of them.

    Example:
        >>> is_first_rank()
        True
    """
    backend = keras.backend.backend()
    if backend == "jax":
        return int(sys.modules["jax"].process_index()) == 0
    if backend == "torch":
        distributed = sys.modules["torch"].distributed
        initialised = distributed.is_available() and distributed.is_initialized()
        return not initialised or distributed.get_rank() == 0
    if backend == "tensorflow":
        resolver = sys.modules["tensorflow"].distribute.get_strategy().cluster_resolver
        return resolver is None or not resolver.task_id
    return os.environ.get("RANK", "0") == "0"
