"""The network behind the forecasts: a few small networks side by side, in numpy."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.early_stopping.history import Array

FORMAT = 1
WEIGHTS = Path(__file__).with_name("weights.npz")

LIMIT = 4.0  # so that one feature far out cannot outweigh all others


@dataclass(frozen=True)
class Opinion:
    """What the members of the ensemble think of some moments of a curve.

    Args:
        probabilities: Of each bin of the improvement to come, by member and moment.
        places: Where the best value comes, as a share of what is left, by member and moment.
        hidden: The last hidden layer, by member, moment and unit.
        strangeness: How far the features are from those of training, by moment; above 1, farther
            than 99% of them.
    """

    probabilities: Array
    places: Array
    hidden: Array
    strangeness: Array


class Network:
    """An ensemble of perceptrons with two outputs: a forecast, and when to stop.

    The forecast is a distribution over bins of the improvement to come. The stopping output also
    takes the price of an evaluation: how much improvement, as a share of the range, must be
    expected for the whole budget to be worth its time.

    Args:
        arrays: Weights by name, as `save` writes them.
    """

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._arrays = arrays
        # Computed in double precision, for a shifted curve differs in the last digits.
        self._w = {k: v.astype(np.float64) for k, v in arrays.items() if v.dtype == np.float32}
        self.names: list[str] = arrays["names"].tolist()
        self.edges: Array = arrays["edges"]
        self.middles: Array = arrays["middles"]
        self.prices = dict(zip(arrays["presets"].tolist(), arrays["prices"].tolist(), strict=True))

    @property
    def members(self) -> int:
        """Number of networks in the ensemble."""
        return int(self._arrays["w1"].shape[0])

    def __call__(self, features: dict[str, Array]) -> Opinion:
        """Forecast for each moment.

        Args:
            features: Columns by name, one value per moment.
        """
        w = self._w
        raw = np.column_stack([features[name] for name in self.names])
        x = standardised(raw, w["center"], w["scale"])
        distance = np.sqrt(np.mean(((x - w["mean"]) @ w["whitening"]) ** 2, axis=1))
        strange = distance / w["farthest"]
        hidden = _silu(_silu(x @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"])
        out = hidden @ w["wf"] + w["bf"]
        return Opinion(_softmax(out[..., :-1]), 1 / (1 + np.exp(-out[..., -1])), hidden, strange)

    def stopping(self, opinion: Opinion, prices: Array) -> Array:
        """Log-odds of stopping, by member, price and moment.

        Args:
            opinion: What this network said of the moments.
            prices: What a whole budget is worth, as a share of the range of the curve.
        """
        w = self._w
        price = np.log(prices)[:, None, None] + 3
        shifted = opinion.hidden[:, None] + price * w["wp"][:, None] + w["bp"][:, None]
        turned = _silu(shifted @ w["w3"][:, None] + w["b3"][:, None])
        odds = turned @ w["ws"][:, None] + w["bs"][:, None]
        return np.asarray(odds[..., 0])

    def calibrated(self, probabilities: Array) -> Array:
        """Chances of the bins as the mean of the members has them, put right by held-out curves.

        The log-odds of an improvement are shifted and stretched; the bins share it as before.

        Args:
            probabilities: By moment and bin.
        """
        slope, shift = self._arrays["calibration"]
        improving = np.clip(1 - probabilities[:, :1], 1e-9, 1 - 1e-9)
        odds = slope * np.log(improving / (1 - improving)) + shift
        chance = 1 / (1 + np.exp(-np.clip(odds, -30, 30)))
        return np.hstack([1 - chance, probabilities[:, 1:] * (chance / improving)])

    def settled(self, prices: dict[str, float], calibration: tuple[float, float]) -> Network:
        """The same network with other prices behind the presets, and another calibration."""
        names, values = np.array(list(prices)), np.array(list(prices.values()))
        settings = {"presets": names, "prices": values, "calibration": np.array(calibration)}
        return Network(self._arrays | settings)

    def save(self, path: str | Path) -> None:
        """Write the weights, with a digest that `load` checks."""
        arrays: dict[str, Any] = self._arrays | {"format": np.array(FORMAT)}
        arrays["digest"] = np.array(_digest(arrays))
        part = Path(f"{path}.part")
        with part.open("wb") as file:
            np.savez_compressed(file, **arrays)
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path = WEIGHTS) -> Network:
        """Read weights; nothing in the file is run.

        Raises:
            ValueError: The file is damaged, or of a newer format.
        """
        cure = (
            "install lightning-keras-ext again, or train anew with strategies.early_stopping.train"
        )
        try:
            with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            version, digest = int(arrays["format"]), str(arrays["digest"])
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(
                f"{path} holds no weights of a forecaster ({error}); {cure}"
            ) from error
        if version > FORMAT:
            raise ValueError(
                f"{path} has format {version}, newer than the {FORMAT} that this version of "
                "lightning-keras-ext reads; upgrade lightning-keras-ext"
            )
        if digest != _digest(arrays):
            raise ValueError(f"{path} was changed after it was written; {cure}")
        return cls(arrays)


def network_of(weights: str | os.PathLike[str] | None = None) -> Network:
    """The network in a file, or the one that comes with the package; read once unless it changes.

    Args:
        weights: Path of the file. Default: None, what the package ships.

    Raises:
        TypeError: It is no path.
        FileNotFoundError: There is no such file.
        ValueError: The file holds no weights, is damaged, or of a newer format.
    """
    if weights is None:
        return _read(str(WEIGHTS), 0)
    if not isinstance(weights, str | os.PathLike) or not os.fspath(weights):
        raise TypeError(f"weights must be the path of a file or None, got {weights!r}")
    return _read(os.fspath(weights), os.stat(weights).st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: str, changed: int) -> Network:
    return Network.load(path)


def _digest(arrays: dict[str, NDArray[Any]]) -> str:
    total = hashlib.sha256()
    for name in sorted(arrays.keys() - {"digest"}):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return total.hexdigest()


def _silu(x: Array) -> Array:
    # Without overflow: exp of what is never positive.
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, x / (1 + small), x * small / (1 + small)))


def standardised(x: NDArray[Any], center: NDArray[Any], scale: NDArray[Any]) -> NDArray[Any]:
    """Features around 0, of a spread of about 1, far outliers cut."""
    return np.asarray(np.clip((x - center) / scale, -LIMIT, LIMIT))


def _softmax(x: Array) -> Array:
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))
