"""Whether the learning-rate schedule is a reason to wait: a drop ahead, or a warm-up under way."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strategies.early_stopping.history import Array

_DROP = 0.5  # of the rate, from one evaluation to the next
_FLAT = 0.9  # a smooth decay, which falls before as well, has no drops
# Of the highest rate: to fall below it changes nothing any more. A little less than a thousandth,
# which three drops by ten come to, up to rounding.
_NEGLIGIBLE = 0.99e-3
_RISE = 1.1


def reason_to_wait(past: ArrayLike, ahead: ArrayLike) -> str | None:
    """Whether stopping now would come just before the rate changes for the better.

    A drop is a fall by half or more from one evaluation to the next, after a stretch where the
    rate was about level: steps and milestones have drops, cosine, linear and exponential decay
    have none, even where several evaluations see the same rate.

    Args:
        past: Learning rate at each evaluation so far, the present one included.
        ahead: Learning rate at each evaluation to come.

    Returns:
        The end of a sentence that begins with "held, as", or None if there is no reason.

    Example:
        >>> reason_to_wait([0.1, 0.1, 0.1], [0.1, 0.01])
        'the learning rate is still to drop'
        >>> reason_to_wait([1.0, 0.75], [0.25, 0.0])
    """
    before, after = np.asarray(past, dtype=float), np.asarray(ahead, dtype=float)
    if not len(before) or not len(after):
        return None
    rates = np.concatenate([before, after])
    if not np.isfinite(rates).all() or not rates.any():
        return None
    peak, now = rates.max(), before[-1]
    if now >= before.max() and after.max() > _RISE * now:
        return "the learning rate still rises"
    changes = np.flatnonzero(np.diff(rates)) + 1
    for k, i in enumerate(changes):
        dropped = _NEGLIGIBLE * peak <= rates[i] <= _DROP * rates[i - 1]
        if i >= max(len(before), 2) and dropped and not _smooth(rates, changes[: k + 1]):
            return "the learning rate is still to drop"
    return None


def _smooth(rates: Array, changes: NDArray[np.int64]) -> bool:
    """Whether the last of these changes ends a decay in small steps.

    A step may take several evaluations, all at one rate: steps that come at the same pace belong
    together.
    """
    last = changes[-1]
    if rates[last - 1] < _FLAT * rates[last - 2]:
        return True
    lengths = np.diff(np.concatenate([[0], changes]))
    for k in range(len(changes) - 2, -1, -1):
        if abs(int(lengths[k + 1]) - int(lengths[-1])) > 1 or lengths[-1] == 1:
            return False
        if _DROP < rates[changes[k]] / rates[changes[k] - 1] < _FLAT:
            return True
    return False


def may_drop(rate: float, factor: float, lowest: float, peak: float) -> bool:
    """Whether a scheduler that waits for a plateau can still lower the rate noticeably.

    Args:
        rate: Learning rate now.
        factor: What the scheduler multiplies it by.
        lowest: Rate below which it does not go.
        peak: Highest rate so far.

    Example:
        >>> may_drop(0.1, 0.1, 0.0, 0.1), may_drop(1e-4, 0.1, 0.0, 0.1), may_drop(0.1, 0.1, 0.1, 1)
        (True, False, False)
    """
    lowered = max(rate * factor, lowest)
    return lowered < rate and lowered >= _NEGLIGIBLE * peak
