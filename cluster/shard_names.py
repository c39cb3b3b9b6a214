"""What a shard of the target is called, in status, statistics and messages."""

from __future__ import annotations


def shard_name(rank: int, *, group: int, num_groups: int) -> str:
    """ "shard-0", and where the target has several groups "replica-1.shard-0"."""
    return f"shard-{rank}" if num_groups == 1 else f"replica-{group}.shard-{rank}"
