"""Lines, tables, progress bars and usage errors for people."""

from __future__ import annotations

__all__ = [
    "fetch_progress",
    "lines",
    "options",
    "token_printer",
    "usage",
]
