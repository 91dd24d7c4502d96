"""A user's own `strategies/` or `augment.py` beside their script shadows ours: say so at once."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_OURS = "lightning-keras-ext"


def require_ours(package: str) -> None:
    """Make sure that a sibling package is this distribution's, without running another's code.

    `lightning_ext` holds the same few lines: the adapters never import each other, and what is
    shared lives in `strategies`, the very package that may be shadowed.

    Args:
        package: `"strategies"` or `"augment"`.

    Raises:
        ImportError: Another module of that name comes first on the import path.
    """
    if (module := sys.modules.get(package)) is not None:
        ours = getattr(module, "__distribution__", None) == _OURS
        file, folders = getattr(module, "__file__", None), getattr(module, "__path__", ())
    else:
        # Importing it to look inside would run a user's script called strategies.py once more.
        spec = find_spec(package)
        file = spec.origin if spec else None
        folders = (spec.submodule_search_locations if spec else None) or ()
        # One distribution's packages lie side by side.
        ours = any(Path(folder).parent == Path(__file__).parent.parent for folder in folders)
    if not ours:
        where = file or next(iter(folders), "nothing")
        raise ImportError(
            f"{__package__} needs the {package!r} package of {_OURS}, but {where} comes first on "
            "the import path and shadows it. Rename that file or folder (for example "
            f"my_{package}), or start Python from another folder.",
            name=package,
            path=str(where),
        )
