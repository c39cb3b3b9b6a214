"""What ranks compare when they meet: they must have loaded one checkpoint in one way."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import CheckpointError
from workers.engine.parallel.group import Group


class Loaded(Protocol):
    """What is compared of a checkpoint."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Agreed:
    """Numbers that hold for all ranks: the minimum of each."""

    num_blocks: int
    max_model_len: int


def agree(
    group: Group,
    loaded: Loaded,
    weights: str,
    num_blocks: int,
    max_model_len: int,
    *,
    multi_threaded: bool,
) -> Agreed:
    """Compare what the ranks loaded. Raises CheckpointError, on all ranks, if they differ."""
    form = int.from_bytes(hashlib.sha256(weights.encode()).digest()[:7], "big")
    checkpoint = int.from_bytes(loaded.digest[:7], "big")
    rows = group.exchange([checkpoint, form, int(multi_threaded), num_blocks, max_model_len])
    for column, what in enumerate(("checkpoint", "form of weights", "choice of one thread")):
        others = [rank for rank, row in enumerate(rows) if row[column] != rows[0][column]]
        if others:
            raise CheckpointError(
                f"the shards differ in their {what}: rank {group.place.rank} has {loaded.name!r} "
                f"as {weights}; these differ from rank 0: rank {', '.join(map(str, others))}; give "
                "all hosts the same files and options (config.json, tensors, file sizes and "
                "samples of the files are compared)"
            )
    return Agreed(min(row[3] for row in rows), min(row[4] for row in rows))
