"""A user's own `strategies/` or `augment.py` beside their script shadows ours: say so at once."""

from __future__ import annotations

import importlib

_OURS = "lightning-keras-ext"


def require_ours(package: str) -> None:
    """Import a sibling package and make sure that it is this distribution's.

    `keras_ext` holds the same few lines: the adapters never import each other, and what is
    shared lives in `strategies`, the very package that may be shadowed.

    Args:
        package: `"strategies"` or `"augment"`.

    Raises:
        ImportError: Another module of that name comes first on the import path.
    """
    module = importlib.import_module(package)
    if getattr(module, "__distribution__", None) == _OURS:
        return
    where = getattr(module, "__file__", None) or list(getattr(module, "__path__", ["?"]))[0]
    raise ImportError(
        f"{__package__} needs the {package!r} package of {_OURS}, but {where} comes first on the "
        f"import path and shadows it. Rename that file or folder (for example my_{package}), or "
        "start Python from another folder.",
        name=package,
        path=str(where),
    )
