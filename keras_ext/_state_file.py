"""State of a callback on disk: a JSON file, and the weights of the best epochs beside it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

_KEPT = 2  # best epochs: whoever goes back by one epoch may need the one before


class StateFile:
    """Plain state in a file that is always whole, whenever the process dies.

    Args:
        path: Of the JSON file; weights go to `<path>.best-<epoch>.npz` beside it.

    Raises:
        ValueError: The path is that of a folder, or of nothing.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        if not self.path.name or self.path.is_dir() or "\0" in path:
            raise ValueError(f"state_path must be the path of a JSON file, got {path!r}")
        self._weights: list[int] = []  # epochs whose weights are there

    def clear(self) -> None:
        """Forget the weights of an earlier fit."""
        self._weights = []

    def write(self, state: dict[str, Any]) -> None:
        """Replace the state; weights that it no longer needs go."""
        text = json.dumps(state | {"weights": self._weights})
        _replace(self.path, lambda file: file.write(text.encode()))
        mine = re.compile(rf"{re.escape(self.path.name)}\.best-(\d+)\.npz")
        for path in list(self.path.parent.iterdir()):
            found = mine.fullmatch(path.name)
            if found and int(found[1]) not in self._weights:
                path.unlink(missing_ok=True)

    def read(self) -> dict[str, Any] | None:
        """The state, or None if there is no file.

        Raises:
            ValueError: The file holds something else.
        """
        if not self.path.exists():
            return None
        try:
            state = dict(json.loads(self.path.read_text("utf-8")))
            self._weights = [int(epoch) for epoch in state.pop("weights")]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise self.useless(error) from error
        return state

    def useless(self, why: object) -> ValueError:
        """The error for a file that holds something else."""
        return ValueError(
            f"state_path={str(self.path)!r} holds no state of this callback ({why}); delete "
            "the file to begin with an empty history, or pass another path"
        )

    def write_weights(self, epoch: int, weights: Sequence[np.ndarray]) -> None:
        """Keep the weights of an epoch; the next `write` makes it known."""
        _replace(self._weights_path(epoch), lambda file: np.savez(file, *weights))
        self._weights = [*[e for e in self._weights if e < epoch], epoch][-_KEPT:]

    def read_weights(self, epoch: int, like: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """The weights of an epoch, in the types of others, or None if there are no such."""
        if epoch not in self._weights:
            return None
        try:
            with (
                open(self._weights_path(epoch), "rb") as raw,
                np.load(raw, allow_pickle=False) as file,
            ):
                arrays = [file[name] for name in file.files]
        except Exception:  # missing or damaged, in one of many ways
            return None
        if [a.shape for a in arrays] != [w.shape for w in like]:
            return None
        # numpy does not know bfloat16, and gives back its bytes.
        pairs = zip(arrays, like, strict=True)
        return [a.view(w.dtype) if a.dtype.kind == "V" else a for a, w in pairs]

    def _weights_path(self, epoch: int) -> Path:
        return self.path.with_name(f"{self.path.name}.best-{epoch}.npz")


def _replace(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    with open(unfinished, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
