"""Lines and tables for people, on stdout and stderr."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_UNBOUNDED = 10_000
"""Columns; more than any table of ours has."""


def plain(console: Console, line: str) -> None:
    """Print a line as it is: rich would make a picture of `:100:`, the line of a file."""
    console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def whole_table(console: Console, table: Table) -> None:
    """Print a table as wide as it is: rich would cut what is wider than the terminal.

    A narrower terminal goes on in the next line.
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
