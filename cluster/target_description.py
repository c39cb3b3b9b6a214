"""What a target says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.rules import MAX_SEQUENCE_TOKENS
from paceline.v1 import target_pb2


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """What all shards of the target have in common. `model`: as they call it.

    `checkpoint_digest`: of its files; `dtype`: what the model computes in (target.proto).
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
        """What all groups must have in common, for as long as the driver runs, in words by name."""
        return {
            "model": repr(self.model),
            "vocab_size": str(self.vocab_size),
            "checkpoint_digest": self.checkpoint_digest.hex()[:8] or "unknown",
        }

    @property
    def kv(self) -> Mapping[str, str]:
        """What groups that serve at the same time must have in common besides: else a sequence
        that moves from one to the other would not keep its text."""
        return {"block_size": str(self.block_size), "dtype": self.dtype or "unknown"}

    @property
    def room(self) -> int:
        """Most tokens that one sequence may have."""
        return min(self.max_model_len, self.num_blocks * self.block_size, MAX_SEQUENCE_TOKENS)


def description_of(
    shards: Sequence[target_pb2.DescribeTargetResponse],
) -> TargetDescription:
    """What the shards of one group have in common, which is as large as the smallest of them."""
    return TargetDescription(
        model=shards[0].model,
        vocab_size=shards[0].vocab_size,
        max_model_len=min(shard.max_model_len for shard in shards),
        block_size=shards[0].block_size,
        num_blocks=min(shard.num_blocks for shard in shards),
        checkpoint_digest=shards[0].checkpoint_digest,
        dtype=shards[0].dtype,
    )
