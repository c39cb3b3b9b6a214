"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.decoding.counts import Counts


@dataclass(slots=True)
class Totals:
    """Counts since the scheduler began; `counts` are those of all sequences together."""

    steps: int = 0
    finished: int = 0
    prefilled: int = 0
    dropped_proposals: int = 0
    malformed_proposals: int = 0
    counts: Counts = field(default_factory=Counts)
