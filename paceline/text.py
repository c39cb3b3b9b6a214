"""Wording that several messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the known name nearest to `given`; empty where none is near."""
    nearest = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""
