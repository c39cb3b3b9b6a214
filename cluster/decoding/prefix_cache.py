"""KV blocks and who may read them: full blocks of verified tokens are shared between sequences.

Only blocks below the committed tokens are kept: nobody writes them again. How blocks are known and
which go first is said in workers/engine/shared_blocks.py, which drafters use as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.decoding.sequence import Sequence
from workers.engine.block_pool import blocks_for
from workers.engine.shared_blocks import SharedBlocks, extend_keys


class PrefixCache(SharedBlocks):
    """The block pool of a target, and what is in blocks that were computed."""

    def __init__(self, num_blocks: int, block_size: int, *, enabled: bool = True) -> None:
        super().__init__(num_blocks)
        self.block_size = block_size
        self._enabled = enabled

    def release(self, sequence: Sequence) -> None:
        """The sequence holds its blocks no more; the table itself is left as it is."""
        self.let_go(sequence.kv.block_table)

    def adopt(self, sequence: Sequence) -> None:
        """Give a sequence that has not begun the blocks that hold its first tokens already.

        The last committed token is left out: it must be computed for its logits.
        """
        if not self._enabled:
            return
        table = sequence.kv.block_table
        for key in self._keys_to_prefill(sequence)[len(table) :]:
            block = self.hold(key)
            if block is None:
                break
            table.append(block)
        sequence.kv.length = len(table) * self.block_size

    def keep(self, sequence: Sequence) -> None:
        """Remember the blocks of a sequence that have become full of verified tokens."""
        if not self._enabled:
            return
        held = sequence.kv
        verified = int(min(held.length, held.plain_until)) // self.block_size
        if verified <= held.blocks_kept:
            return
        self._hash_blocks(sequence, verified)
        for index in range(held.blocks_kept, verified):
            block = held.block_table[index]
            self.offer(sequence.block_keys[index], block, tenant=sequence.request.tenant)
        held.blocks_kept = verified

    def wanted(self, sequence: Sequence, length: int) -> int:
        """How many of the available blocks a sequence takes until it has `length` positions."""
        lacking = blocks_for(length, self.block_size) - len(sequence.kv.block_table)
        if not self._enabled or sequence.kv.open_at_target:
            return lacking
        for key in self._keys_to_prefill(sequence)[len(sequence.kv.block_table) :]:
            if not self.knows(key):
                break
            lacking -= not self.is_idle(key)  # others hold it, so it takes no room
        return lacking

    def num_known(self, sequence: Sequence) -> int:
        """How many blocks of a sequence that has not begun need not be computed."""
        keys = self._keys_to_prefill(sequence) if self._enabled else []
        return next((i for i, key in enumerate(keys) if not self.knows(key)), len(keys))

    def next_key(self, sequence: Sequence) -> bytes | None:
        """What a sequence that has not begun computes first, if that is a block to be shared."""
        keys = self._keys_to_prefill(sequence) if self._enabled else []
        num_held = len(sequence.kv.block_table)
        return keys[num_held] if len(keys) > num_held else None

    def keys_ahead(self, sequence: Sequence) -> Iterable[bytes]:
        """The blocks to be shared that a sequence is about to compute."""
        if not self._enabled:
            return ()
        return self._keys_to_prefill(sequence)[sequence.kv.length // self.block_size :]

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that blocks are neither leaked nor written by one while others read them."""
        self.check_tables(
            (one.kv.block_table, one.kv.length // self.block_size, one.block_keys)
            for one in sequences
        )

    def _keys_to_prefill(self, sequence: Sequence) -> list[bytes]:
        """Of all full blocks before the last committed token."""
        count = (sequence.tree.num_committed - 1) // self.block_size
        self._hash_blocks(sequence, count)
        return sequence.block_keys[:count]

    def _hash_blocks(self, sequence: Sequence, count: int) -> None:
        extend_keys(
            sequence.block_keys,
            sequence.tree.token_ids,
            count,
            block_size=self.block_size,
            tenant=sequence.request.tenant,
        )
