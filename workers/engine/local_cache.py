"""The sequences whose KV a drafter holds on its own device, and the pool they share.

Unlike the target, whose blocks belong to the scheduler, a drafter keeps its own books.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.block_pool import BlockPool, blocks_for
from workers.engine.slices import Slice


class LocalSequence:
    """Token ids of a sequence, its blocks, and for how many of its tokens KV is stored.

    A token has one slot, in the order in which they were added. Which of them are a chain and which
    a tree is the caller's affair (drafting/tree_kv.py).
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.token_ids: list[int] = []
        self.block_table: list[int] = []
        self.num_stored = 0
        """KV is stored for the first so many tokens."""

    def __len__(self) -> int:
        """Tokens, each of which has a slot."""
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens, whose KV is still missing. Raises OverloadedError, changing nothing."""
        wanted = blocks_for(len(self.token_ids) + len(token_ids), self._block_size)
        missing = wanted - len(self.block_table)
        if missing > 0:
            self.block_table.extend(self._pool.allocate(missing))
        self.token_ids.extend(token_ids)

    def truncate_to(self, position: int) -> None:
        """Keep the first `position` tokens; blocks that hold none go to the pool."""
        assert 0 <= position <= len(self.token_ids), (position, len(self.token_ids))
        del self.token_ids[position:]
        self.num_stored = min(self.num_stored, position)
        keep = blocks_for(position, self._block_size)
        self._pool.free(self.block_table[keep:])
        del self.block_table[keep:]

    def pending_slice(self, *, num_logits: int = 1, limit: int | None = None) -> Slice:
        """The slice that stores KV of pending tokens, at most `limit` of them, as a chain.

        Logits are asked for only if the slice reaches the last token. After the step that feeds it,
        call `mark_stored` with the slice's length.
        """
        end = len(self.token_ids)
        if limit is not None:
            end = min(end, self.num_stored + limit)
        fed = self.token_ids[self.num_stored : end]
        wanted = num_logits if end == len(self.token_ids) else 0
        return Slice(self.block_table, self.num_stored, fed, min(wanted, len(fed)))

    def mark_stored(self, count: int) -> None:
        """KV of the next `count` tokens is stored now."""
        assert self.num_stored + count <= len(self.token_ids)
        self.num_stored += count


class LocalCache:
    """The open sequences of a device, by any hashable name the caller gives them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._sequences: dict[object, LocalSequence] = {}

    def open(self, name: object) -> LocalSequence:
        """Begin an empty sequence under a name that is not in use."""
        assert name not in self._sequences, f"sequence {name!r} is open already"
        sequence = LocalSequence(self._pool, self._block_size)
        self._sequences[name] = sequence
        return sequence

    def close(self, name: object) -> None:
        """End a sequence and free its blocks."""
        self._sequences.pop(name).truncate_to(0)

    def check_integrity(self) -> None:
        """Assert that every block is free or held once, and by a sequence that needs it."""
        held = list(self._sequences.values())
        self._pool.check_integrity([sequence.block_table for sequence in held])
        for sequence in held:
            needed = blocks_for(len(sequence), self._block_size)
            assert len(sequence.block_table) == needed
            assert 0 <= sequence.num_stored <= len(sequence)
