"""Names of the target's shards, in status, statistics and messages."""

from __future__ import annotations


def shard_name(rank: int, *, group: int, num_groups: int) -> str:
    """ "shard-0", or "replica-1.shard-0" if the target has several groups."""
    return f"shard-{rank}" if num_groups == 1 else f"replica-{group}.shard-{rank}"
