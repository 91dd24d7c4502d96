"""Tables for people: the decisions of a run when it ends, and others as text."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import TextIO

from strategies.decisions import Decision

_COLUMNS = ("step", "callback", "action", "reason")


def print_decisions(decisions: Iterable[Decision], file: TextIO | None = None) -> None:
    """Print decisions as one table, in the order in which they were taken.

    Uses `rich` where it is installed, plain aligned text otherwise. Prints nothing when there
    is nothing to say, and only warns where the output cannot be written to.

    Args:
        decisions: Decisions of any number of callbacks.
        file: Where to print. Default: standard output.

    Example:
        >>> print_decisions([])
    """
    rows = [
        (str(d.step), d.callback, d.action, d.reason)
        for d in sorted(decisions, key=lambda d: (d.step, d.time))
    ]
    if not rows:
        return
    file = file if file is not None else sys.stdout
    # The run is done and its results count for more than this table.
    try:
        _print(rows, file)
    except UnicodeError:
        print(_plain_table(_COLUMNS, rows).encode("ascii", "replace").decode(), file=file)
    except (OSError, ValueError) as error:  # a closed pipe or file
        warnings.warn(f"the decision table could not be printed: {error}", stacklevel=2)


def _print(rows: Sequence[Sequence[str]], file: TextIO) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(_plain_table(_COLUMNS, rows), file=file)
        return
    table = Table(*_COLUMNS, title="Decisions", title_justify="left")
    for row in rows:
        table.add_row(*row)
    # Off a terminal rich assumes 80 columns and folds every reason into a sliver.
    console = Console(file=file, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], plain: bool = False) -> str:
    """A table as text, drawn by `rich` where it is installed.

    Args:
        columns: Headings.
        rows: Cells of each row.
        plain: Leave `rich` aside. Default: False.

    Example:
        >>> print(table(["stage", "parts"], [["0", "embed, h.0"], ["1", "head"]], plain=True))
        stage  parts
        0      embed, h.0
        1      head
    """
    if not plain:
        try:
            from rich import box
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            plain = True
    if plain:
        return _plain_table(columns, rows)
    # Log files and terminals of any encoding take what is in ASCII.
    drawn = Table(*columns, box=box.ASCII2)
    for row in rows:
        drawn.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=120, markup=False, highlight=False, emoji=False).print(drawn)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
