"""Lines for people, on stdout and stderr."""

from __future__ import annotations

from rich.console import Console


def plain(console: Console, line: str) -> None:
    """Print a line as it is: rich would make a picture of `:100:`, the line of a file."""
    console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
