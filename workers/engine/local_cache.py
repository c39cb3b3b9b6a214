"""The sequences whose KV a drafter holds on its own device, and the pool they share.

Unlike the target, whose blocks belong to the scheduler, a drafter keeps its own books. Sequences of
one tenant that begin alike read the same blocks: those full of verified tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workers.engine.block_pool import blocks_for
from workers.engine.shared_blocks import BlockKeys, KvKind, SharedBlocks
from workers.engine.slices import Slice


class LocalSequence:
    """Token ids of a sequence, its blocks, and for how many of its tokens KV is stored.

    A token has one slot, in the order in which they were added. Which of them are a chain and which
    a tree is the caller's affair (drafting/tree_kv.py).
    """

    def __init__(self, pool: SharedBlocks, block_size: int, tenant: str) -> None:
        self._pool = pool
        self._block_size = block_size
        # One device holds one model, so its block size is all that blocks could differ in.
        self._block_keys = BlockKeys(KvKind(block_size), tenant=tenant)
        self._num_offered = 0
        self._plain_until: float = math.inf
        self.token_ids: list[int] = []
        self.block_table: list[int] = []
        self.num_stored = 0
        """KV is stored for the first so many tokens."""

    def __len__(self) -> int:
        """Tokens, each of which has a slot."""
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens, whose KV is still missing. Raises OverloadedError, changing nothing."""
        missing = self._missing_blocks(len(self.token_ids) + len(token_ids))
        if missing > 0:
            self.block_table.extend(self._pool.allocate(missing))
        self.token_ids.extend(token_ids)

    def check_room(self, num_tokens: int) -> None:
        """Raise OverloadedError unless it could grow to so many tokens now. Takes nothing."""
        self._pool.check_room(self._missing_blocks(num_tokens))

    def truncate_to(self, position: int) -> None:
        """Keep the first `position` tokens; blocks that hold none go to the pool.

        Blocks that were offered to others must stay.
        """
        assert self._num_offered * self._block_size <= position <= len(self.token_ids)
        del self.token_ids[position:]
        self.num_stored = min(self.num_stored, position)
        if position <= self._plain_until:
            self._plain_until = math.inf
        keep = blocks_for(position, self._block_size)
        self._pool.let_go(self.block_table[keep:])
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

    def mark_moved(self, slot: int) -> None:
        """KV was moved to this slot: from there on it is not what feeding a chain makes, to the
        bit, and so is never shared, until it is truncated.
        """
        self._plain_until = min(self._plain_until, slot)

    def adopt(self, verified_ids: Sequence[int]) -> None:
        """Take the blocks that hold its next tokens already, in place of its own.

        Nothing is taken after KV that was moved: what follows that differs in the last bits.
        `verified_ids` is all of the sequence that is final; its tokens begin it or are its begin.
        The last is left out: it must be fed for its logits.
        """
        size = self._block_size
        count, index = (len(verified_ids) - 1) // size, self.num_stored // size
        if index >= count or self._plain_until < self.num_stored:
            return
        keys = self._block_keys.first(count, verified_ids)
        while index < count and (block := self._pool.hold(keys[index])) is not None:
            self._pool.let_go(self.block_table[index : index + 1])
            self.block_table[index : index + 1] = [block]
            index += 1
            self._num_offered = index
            self.num_stored = index * size
        self.token_ids.extend(verified_ids[len(self.token_ids) : self.num_stored])

    def offer(self, num_verified: int) -> None:
        """Let others read the blocks that are full of the first `num_verified` tokens.

        These tokens are a chain, are final, and are not fed again.
        """
        size = self._block_size
        count = int(min(num_verified, self.num_stored, self._plain_until)) // size
        if count <= self._num_offered:
            return
        keys = self._block_keys.first(count, self.token_ids)
        for index in range(self._num_offered, count):
            block = self.block_table[index]
            self._pool.offer(keys[index], block, tenant=self._block_keys.tenant)
        self._num_offered = count

    def close(self) -> None:
        """Let go of all its blocks."""
        self._pool.let_go(self.block_table)

    def table_to_check(self) -> tuple[Sequence[int], int, Sequence[bytes]]:
        """As SharedBlocks.check_tables takes it; asserts that the numbers fit each other."""
        assert len(self.block_table) == blocks_for(len(self), self._block_size)
        assert 0 <= self.num_stored <= len(self)
        keys = self._block_keys.known
        assert self._num_offered <= min(self.num_stored // self._block_size, len(keys))
        return self.block_table, self._num_offered, keys

    def _missing_blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self._block_size) - len(self.block_table)


class LocalCache:
    """The open sequences of a device, by any hashable name the caller gives them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = SharedBlocks(num_blocks)
        self._block_size = block_size
        self._sequences: dict[object, LocalSequence] = {}

    def open(self, name: object, *, tenant: str = "") -> LocalSequence:
        """Begin an empty sequence under a name that is not in use.

        `tenant`: whose sequences may read its blocks.
        """
        assert name not in self._sequences, f"sequence {name!r} is open already"
        sequence = LocalSequence(self._pool, self._block_size, tenant)
        self._sequences[name] = sequence
        return sequence

    def close(self, name: object) -> None:
        """End a sequence and free its blocks."""
        self._sequences.pop(name).close()

    def check_integrity(self) -> None:
        """Assert that every block is free or held by the sequences that need it, and that what
        several read none of them writes.
        """
        self._pool.check_tables(one.table_to_check() for one in self._sequences.values())
