"""The KV of a sequence on one target group: where it lies, and how much of it there is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cluster.decoding.instructions import Slice


@dataclass(slots=True, eq=False)
class HeldKv:
    """KV of one sequence on one target group. Mutable, owned by the scheduler.

    A sequence that gives its blocks back has a new one instead; one that goes on where another
    group has it takes over that group's.
    """

    group: int | None = None
    """Where it runs; None: it waits."""
    length: int = 0
    """Positions below are computed."""
    block_table: list[int] = field(default_factory=list)
    blocks_sent: int = 0
    """So many blocks of the table are known to the shards."""
    open_at_target: bool = False
    moves: tuple[tuple[int, int], ...] = ()
    """Positions that its next slice moves, (from, to), before all else."""
    in_flight: Slice | None = None
    blocks_kept: int = 0
    """So many of its blocks were offered to other sequences."""
    plain_until: float = math.inf
    """From here on it is not what prefill makes, to the bit, and so is never shared."""
