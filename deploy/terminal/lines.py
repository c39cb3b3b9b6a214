"""Prints lines and tables for people, on stdout and stderr."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

_UNBOUNDED = 10_000
"""Columns; more than any of our tables has."""
_NOTHING = ("", "0", "0%", "0.0", "0.00", "none")
"""Cells that say that nothing has happened."""
_LEAST_WORDS = 20
"""Columns beside a label, below which words are not broken to fit."""


def plain(console: Console, line: str) -> None:
    """Print a line as it is. By default rich would turn `:100:` into a picture."""
    console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def fact(console: Console, label: str, words: str) -> None:
    """Print `label`, and words beside it. A terminal gets lines that break at words."""
    indent = len(label) + 1
    if console.is_terminal and console.width > indent + _LEAST_WORDS:
        words = f"\n{' ' * indent}".join(
            textwrap.wrap(
                words, console.width - indent, break_on_hyphens=False, break_long_words=False
            )
        )
    plain(console, f"{label} {words}")


def table_of(words: Sequence[str], figures: Sequence[str] = ()) -> Table:
    """An empty table without lines: columns of words, then columns of figures, by their titles."""
    table = Table(box=None, pad_edge=False)
    for title in words:
        table.add_column(title)
    for title in figures:
        table.add_column(title, justify="right")
    return table


def whole_table(console: Console, table: Table, *, optional: Sequence[str] = ()) -> None:
    """Print a table whole: rich would cut its cells at the terminal's width.

    Where a terminal is too narrow, columns in which nothing has happened are left out (all cells
    are zero or empty), then those with the titles `optional`, the first one first. If that is not
    enough, each row is a card: its first cell, and a line for each other one.
    """
    narrow, left_out = table, list[str]()
    if console.is_terminal:
        narrow, left_out = narrowed(console, table, optional)
        if _width_of(console, narrow) > console.width:
            _cards(console, table)
            return
    Console(
        file=console.file,
        width=max(_width_of(console, narrow), 1),
        highlight=False,
        force_terminal=console.is_terminal,
        no_color=console.no_color,
        markup=False,
        emoji=False,
    ).print(narrow)
    if left_out:
        fact(console, "left out:", f"{', '.join(left_out)} (a wider terminal has them)")


def narrowed(console: Console, table: Table, optional: Sequence[str]) -> tuple[Table, list[str]]:
    """The table with as few columns left out as let it fit, and the titles of the optional ones."""
    left_out: list[str] = []
    if _width_of(console, table) > console.width:
        nothing = [one for one in table.columns if all(str(cell) in _NOTHING for cell in one.cells)]
        table = _without(table, nothing)
    for title in optional:
        if _width_of(console, table) <= console.width:
            break
        kept = _without(table, [one for one in table.columns if str(one.header) == title])
        if len(kept.columns) < len(table.columns):
            left_out.append(title)
        table = kept
    return table, left_out


def _without(table: Table, columns: Sequence[Column]) -> Table:
    kept = [column for column in table.columns if column not in columns]
    narrow = Table(box=table.box, pad_edge=table.pad_edge, padding=table.padding)
    for column in kept:
        narrow.add_column(column.header, justify=column.justify)
    for row in zip(*(column.cells for column in kept), strict=True):
        narrow.add_row(*row)
    return narrow


def _cards(console: Console, table: Table) -> None:
    first, *others = table.columns
    indent = max((len(str(column.header)) for column in others), default=0)
    for name, *cells in zip(first.cells, *(column.cells for column in others), strict=True):
        plain(console, str(name))
        for column, cell in zip(others, cells, strict=True):
            if str(cell):
                fact(console, f"  {str(column.header).ljust(indent)} ", str(cell))


def _width_of(console: Console, table: Table) -> int:
    unbounded = Console(file=console.file, width=_UNBOUNDED, highlight=False)
    return Measurement.get(unbounded, unbounded.options, table).maximum
