"""Wording that several messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the known name nearest to `given`; empty where none is near."""
    nearest = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def counted(number: int, noun: str) -> str:
    """ "1 row", "2 rows": a number with its noun in the right form."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
