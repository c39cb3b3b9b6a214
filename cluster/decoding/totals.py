"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Counts since the scheduler began."""

    steps: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    finished: int = 0
    prefilled: int = 0
    dropped_proposals: int = 0
    malformed_proposals: int = 0
