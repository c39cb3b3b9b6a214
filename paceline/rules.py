"""The names and limits of speculation, as configuration and requests give them."""

from __future__ import annotations

import enum
from typing import Literal, get_args

DrafterKind = Literal["model", "ngram", "recycling"]
DRAFTER_KINDS: tuple[DrafterKind, ...] = get_args(DrafterKind)
MAX_WINDOW = 64
"""Most candidates of a sequence in a step; the least is 1."""
MAX_BRANCHES = 8
"""Most candidates of a position."""
MAX_PROPOSED = 1024
"""Most candidates of a proposal, and so of a slice (drafting.proto, Proposal)."""


class Rule(enum.Enum):
    """How candidates are verified (docs/rules.md)."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    KSEQ = "kseq"
    RECURSIVE = "recursive"
    MCSD = "mcsd"
    ONE_HOT = "one-hot"


class Stopping(enum.Enum):
    """When a drafter stops before its grant is used up (docs/rules.md)."""

    FIXED = "fixed"
    ADAEDL = "adaedl"
    CONFIDENCE = "confidence"
    COST = "cost"
