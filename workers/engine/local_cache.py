"""The sequences whose KV is on a drafter's own device, and the pool of blocks that they share.

The scheduler manages the target's blocks; a drafter manages its own. Sequences of one tenant with a
common prefix share the blocks that are full of verified tokens of that prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workers.engine.kv_blocks import BlockKeys, KvKind, SharedBlocks, blocks_for
from workers.engine.slices import Slice


class LocalSequence:
    """Token ids of a sequence, its blocks, and the number of its tokens whose KV is stored.

    Each token has one slot, in the order in which tokens were added. Only the caller knows whether
    they form a chain or a tree (drafting/kinds/model/tree_kv.py).
    """

    def __init__(self, pool: SharedBlocks, block_size: int, tenant: str) -> None:
        self._pool = pool
        self._block_size = block_size
        # A pool has one model, so no checkpoint or dtype needs to distinguish its blocks.
        self._block_keys = BlockKeys(KvKind(block_size), tenant=tenant)
        self._num_offered = 0
        self._plain_until: float = math.inf
        self.token_ids: list[int] = []
        self.block_table: list[int] = []
        self.num_stored = 0
        """The number of tokens, from the first on, whose KV is stored."""

    def __len__(self) -> int:
        """The number of tokens, each of which has a slot."""
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens without KV.

        Raises OverloadedError, and appends none, if there are too few blocks.
        """
        missing = self._missing_blocks(len(self.token_ids) + len(token_ids))
        if missing > 0:
            self.block_table.extend(self._pool.allocate(missing))
        self.token_ids.extend(token_ids)

    def check_room(self, num_tokens: int) -> None:
        """Raise OverloadedError if the sequence could not grow to `num_tokens`. Takes no blocks."""
        self._pool.check_room(self._missing_blocks(num_tokens))

    def truncate_to(self, position: int) -> None:
        """Keep the first `position` tokens; blocks without any of them go back to the pool.

        `position` must not be inside a block that was offered to other sequences.
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

        It asks for logits only if it reaches the last token. After the step that feeds it, call
        `mark_stored` with the slice's length.
        """
        end = len(self.token_ids)
        if limit is not None:
            end = min(end, self.num_stored + limit)
        fed = self.token_ids[self.num_stored : end]
        wanted = num_logits if end == len(self.token_ids) else 0
        return Slice(self.block_table, self.num_stored, fed, min(wanted, len(fed)))

    def mark_stored(self, count: int) -> None:
        """Note that KV of the next `count` tokens is stored."""
        assert self.num_stored + count <= len(self.token_ids)
        self.num_stored += count

    def mark_moved(self, slot: int) -> None:
        """Note that KV was moved to this slot, so that nothing from there on is shared.

        Moved KV differs in its last bits from the KV of tokens that were fed as a chain. The note
        ends when the sequence is truncated to `slot` tokens or fewer.
        """
        self._plain_until = min(self._plain_until, slot)

    def adopt(self, verified_ids: Sequence[int]) -> None:
        """Use shared blocks that already have KV of its next tokens, in place of its own blocks.

        No block is taken after KV that was moved, because KV after it differs in the last bits.
        `verified_ids`: all final tokens of the sequence; one of `verified_ids` and `token_ids` is a
        prefix of the other. The last token is left out, since it must be fed for its logits.
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
        """Let other sequences use the blocks that are full of the first `num_verified` tokens.

        These tokens must be a chain and final, and must not be fed again.
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
        """Release all its blocks."""
        self._pool.let_go(self.block_table)

    def table_to_check(self) -> tuple[Sequence[int], int, Sequence[bytes]]:
        """The argument for SharedBlocks.check_tables. Asserts that the numbers are consistent."""
        assert len(self.block_table) == blocks_for(len(self), self._block_size)
        assert 0 <= self.num_stored <= len(self)
        keys = self._block_keys.known
        assert self._num_offered <= min(self.num_stored // self._block_size, len(keys))
        return self.block_table, self._num_offered, keys

    def _missing_blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self._block_size) - len(self.block_table)


class LocalCache:
    """The open sequences of a device, by names that the caller chooses: any hashable objects."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = SharedBlocks(num_blocks)
        self._block_size = block_size
        self._sequences: dict[object, LocalSequence] = {}

    def open(self, name: object, *, tenant: str = "") -> LocalSequence:
        """Open an empty sequence under an unused name. Only its `tenant` may share its blocks."""
        assert name not in self._sequences, f"sequence {name!r} is open already"
        sequence = LocalSequence(self._pool, self._block_size, tenant)
        self._sequences[name] = sequence
        return sequence

    def close(self, name: object) -> None:
        """Close a sequence and free its blocks."""
        self._sequences.pop(name).close()

    def check_integrity(self) -> None:
        """Assert that every block is free or held by the sequences that need it.

        Also assert that no sequence writes a block that several read.
        """
        self._pool.check_tables(one.table_to_check() for one in self._sequences.values())
