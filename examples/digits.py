"""The task of the layer-wise decay examples: few labels for digits that were never seen.

A network is pretrained on the digits 0 to 6 and fine-tuned on ten samples of each of the ten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits

KNOWN = 7  # digits 0 to 6 are there in pretraining
PER_CLASS = 10


@dataclass(frozen=True)
class Split:
    """Images of 8 x 8 pixels in [-1, 1], and their digits."""

    x: np.ndarray
    y: np.ndarray


def load(seed: int = 0) -> tuple[Split, Split, Split]:
    """Pretraining, fine-tuning and test sets; no image is in two of them."""
    images, digits = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 8 - 1).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    images, digits = images[order], digits[order].astype(np.int64)
    rank = np.zeros(len(digits), int)  # position among the images of the same digit
    for digit in range(10):
        rank[digits == digit] = np.arange(np.sum(digits == digit))
    few, test = rank < PER_CLASS, (rank >= PER_CLASS) & (rank < 60)
    known = ~few & ~test & (digits < KNOWN)
    return tuple(Split(images[mask], digits[mask]) for mask in (known, few, test))  # type: ignore[return-value]
