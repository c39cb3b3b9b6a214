"""Parts of messages to users that several modules share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST_CAUSE = 300
"""Longest message of a foreign error, in characters."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the known name nearest to `given`; empty where none is near."""
    nearest = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def counted(number: int, noun: str) -> str:
    """ "1 row", "2 rows": a number with its noun in the right form."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def install_hint(extra: str = "") -> str:
    """What installs the server, with an extra of it. It is on no index, so it takes a checkout."""
    server = f"'./paceline-server[{extra}]'" if extra else "./paceline-server"
    return f"run `pip install . {server}` in a checkout of Paceline"


def one_line(error: BaseException) -> str:
    """An error's message as one line, cut if it is very long."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _LONGEST_CAUSE else f"{words[: _LONGEST_CAUSE - 3]}..."
