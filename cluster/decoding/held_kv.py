"""The KV of a sequence on one target group: where it lies and how far it reaches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cluster.decoding.instructions import Slice


@dataclass(slots=True, eq=False)
class HeldKv:
    """KV of one sequence on one target group. Mutable, owned by the scheduler.

    A sequence that gives its blocks back gets a new HeldKv. A sequence that goes on in another
    group takes over that group's.
    """

    group: int | None = None
    """The group where the sequence runs; None: it waits."""
    length: int = 0
    """KV of all positions below is computed."""
    block_table: list[int] = field(default_factory=list)
    blocks_sent: int = 0
    """Leading blocks of the table that the shards know."""
    open_at_target: bool = False
    moves: tuple[tuple[int, int], ...] = ()
    """KV positions that its next slice moves before all else, as (from, to)."""
    in_flight: Slice | None = None
    blocks_kept: int = 0
    """Leading blocks that were offered to other sequences."""
    plain_until: float = math.inf
    """From here on the KV is not bit-equal to what prefill makes, so it is never shared."""
