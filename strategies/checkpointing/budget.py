"""Memory budgets as people write them."""

from __future__ import annotations

import re
from numbers import Integral, Real
from pathlib import Path
from typing import Any

# Of memory that is free: allocators need room to move, and other processes take some.
SHARE = 0.9

_MOST = 2**63  # more than any device has, and what sizes in torch can be
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{prefix}i": 2 ** (10 * (i + 1)) for i, prefix in enumerate("KMGT")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?|)B?\s*", re.IGNORECASE)
_EXPECTED = (
    "pass a share of what the plain run needs as a float in (0, 1] (1.0 for all of it), bytes as "
    'an int or a text like "6GiB", or "auto"'
)


def check_budget(value: Any) -> float | int | str:
    """A memory budget in its plain form.

    Args:
        value: As the user gives it.

    Returns:
        `"auto"`, a share as a float, or bytes as an int.

    Raises:
        TypeError: It is neither a number nor a text.
        ValueError: It is out of range, or a text that says nothing about memory.

    Example:
        >>> check_budget("6GiB"), check_budget(0.5), check_budget("auto")
        (6442450944, 0.5, 'auto')
    """
    if isinstance(value, str):
        return value if value == "auto" else _bytes(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"memory_budget={value!r}: {_EXPECTED}")
    number = int(value) if isinstance(value, Integral) else float(value)
    if 1 < number < _MOST if isinstance(number, int) else 0 < number <= 1:
        return number
    raise ValueError(f"memory_budget={value!r}: {_EXPECTED}")


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text)
    unit = "" if found is None else found[2][:1].upper() + found[2][1:].lower()
    if found is None or not 1 <= float(found[1]) * _UNITS[unit] < _MOST:
        raise ValueError(f"memory_budget={text!r}: {_EXPECTED}")
    return int(float(found[1]) * _UNITS[unit])


def written(size: float) -> str:
    """Bytes for people.

    Args:
        size: In bytes.

    Example:
        >>> written(6 * 2**30), written(1536)
        ('6.00 GiB', '1.50 KiB')
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def host_memory(path: str = "/proc/meminfo") -> int | None:
    """Bytes that this machine can still give to tensors, or none if it does not say.

    Args:
        path: Where it says so. Default: that of Linux.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    found = sizes.get("MemAvailable", "").split()
    return int(SHARE * 1024 * int(found[0])) if found else None
