"""How a target describes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.rules import MAX_SEQUENCE_TOKENS
from paceline.v1 import target_pb2


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """What all shards of a target group have in common.

    `model`: its name there. `checkpoint_digest`: of the checkpoint's files. `dtype`: the type that
    the model computes in (target.proto).
    """

    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    checkpoint_digest: bytes = b""
    dtype: str = ""

    @property
    def checkpoint(self) -> Mapping[str, str]:
        """Properties that all groups must share as long as the driver runs, in words by name."""
        return {
            "model": repr(self.model),
            "vocab_size": str(self.vocab_size),
            "checkpoint_digest": self.checkpoint_digest.hex()[:8] or "unknown",
        }

    @property
    def kv(self) -> Mapping[str, str]:
        """Further properties that groups must share to serve at the same time.

        Otherwise a sequence that moves between groups would not keep its text.
        """
        return {"block_size": str(self.block_size), "dtype": self.dtype or "unknown"}

    @property
    def room(self) -> int:
        """The most tokens that one sequence may have."""
        return min(self.max_model_len, self.num_blocks * self.block_size, MAX_SEQUENCE_TOKENS)


def description_of(
    shards: Sequence[target_pb2.DescribeTargetResponse],
) -> TargetDescription:
    """The description of a group. It is as large as the smallest of its shards."""
    return TargetDescription(
        model=shards[0].model,
        vocab_size=shards[0].vocab_size,
        max_model_len=min(shard.max_model_len for shard in shards),
        block_size=shards[0].block_size,
        num_blocks=min(shard.num_blocks for shard in shards),
        checkpoint_digest=shards[0].checkpoint_digest,
        dtype=shards[0].dtype,
    )
