"""One harness for measurements, and a file for each suite of `paceline bench`."""

from __future__ import annotations

__all__ = [
    "harness",
    "lookahead",
]
