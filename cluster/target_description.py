"""What a target says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.rules import MAX_SEQUENCE_TOKENS
from paceline.v1 import target_pb2


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """What all shards of the target have in common. `model`: as they call it.

    `checkpoint_digest`: of its files (target.proto).
    """

    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    checkpoint_digest: bytes = b""

    @property
    def made_of(self) -> tuple[str, int, bytes]:
        """What all groups of a target have in common: the checkpoint's name, vocabulary, files."""
        return self.model, self.vocab_size, self.checkpoint_digest

    @property
    def checkpoint(self) -> str:
        """The same in words."""
        files = self.checkpoint_digest.hex()[:8]
        return f"{self.model!r}, {self.vocab_size} tokens, files {files or 'unknown'}"

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
    )
