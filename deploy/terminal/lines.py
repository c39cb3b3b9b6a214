"""Prints lines and tables for people, on stdout and stderr."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_UNBOUNDED = 10_000
"""Columns; more than any of our tables has."""


def plain(console: Console, line: str) -> None:
    """Print a line as it is. By default rich would turn `:100:` into a picture."""
    console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def whole_table(console: Console, table: Table) -> None:
    """Print a table at full width. By default rich would cut it at the terminal's width.

    A narrower terminal wraps the lines.
    """
    unbounded = Console(file=console.file, width=_UNBOUNDED, highlight=False)
    width = Measurement.get(unbounded, unbounded.options, table).maximum
    Console(
        file=console.file,
        width=max(width, 1),
        highlight=False,
        force_terminal=console.is_terminal,
        no_color=console.no_color,
        markup=False,
        emoji=False,
    ).print(table)
