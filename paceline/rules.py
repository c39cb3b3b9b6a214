"""The names of verification and stopping rules, as configuration and requests give them."""

from __future__ import annotations

import enum


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
