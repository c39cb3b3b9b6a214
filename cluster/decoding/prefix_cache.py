"""KV blocks and who may read them: full blocks of verified tokens are shared between sequences.

A block is known by a hash of all tokens up to its end and of the tenant whose they are, so equal
prefixes are found and those of other tenants are not. Only blocks below the committed tokens are
kept: nobody writes them again. A block that no sequence holds stays until its room is needed; the
one whose last use is longest ago goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from cluster.decoding.sequence import Sequence
from workers.engine.block_pool import BlockPool, blocks_for


class PrefixCache:
    """The block pool of a target, and what is in blocks that were computed. Keys are SHA-256."""

    def __init__(self, num_blocks: int, block_size: int, *, enabled: bool = True) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._enabled = enabled
        self._pool = BlockPool(num_blocks)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # Blocks that nobody but the cache holds, the longest unused first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """How many blocks can be had: the free ones and those kept for nobody in particular."""
        return self._pool.num_free + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take blocks to write to, evicting what must go. At most `num_available`."""
        for _ in range(count - self._pool.num_free):
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            self._pool.free([block])
        return self._pool.allocate(count)

    def release(self, sequence: Sequence) -> None:
        """The sequence holds its blocks no more; the table itself is left as it is."""
        # A prefix is of use without what follows it, not the reverse: so it is the last to be idle.
        for block in reversed(sequence.kv.block_table):
            self._pool.free([block])
            if block in self._key_of and self._pool.holders(block) == 1:
                self._idle[block] = None

    def adopt(self, sequence: Sequence) -> None:
        """Give a sequence that has not begun the blocks that hold its first tokens already.

        The last committed token is left out: it must be computed for its logits.
        """
        if not self._enabled:
            return
        table = sequence.kv.block_table
        for key in self._keys_to_prefill(sequence)[len(table) :]:
            block = self._block_of.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._pool.share(block)
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
            key, block = sequence.block_keys[index], held.block_table[index]
            if key not in self._block_of:  # else another sequence computed the same meanwhile
                self._pool.share(block)
                self._block_of[key] = block
                self._key_of[block] = key
        held.blocks_kept = verified

    def wanted(self, sequence: Sequence, length: int) -> int:
        """How many of the available blocks a sequence takes until it has `length` positions."""
        lacking = blocks_for(length, self.block_size) - len(sequence.kv.block_table)
        if not self._enabled or sequence.kv.open_at_target:
            return lacking
        for key in self._keys_to_prefill(sequence)[len(sequence.kv.block_table) :]:
            block = self._block_of.get(key)
            if block is None:
                break
            lacking -= block not in self._idle  # others hold it, so it takes no room
        return lacking

    def num_known(self, sequence: Sequence) -> int:
        """How many blocks of a sequence that has not begun need not be computed."""
        keys = self._keys_to_prefill(sequence) if self._enabled else []
        return next((i for i, key in enumerate(keys) if key not in self._block_of), len(keys))

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
        running = list(sequences)
        tables = [sequence.kv.block_table for sequence in running]
        self._pool.check_integrity([*tables, list(self._key_of)])
        assert {block: key for key, block in self._block_of.items()} == self._key_of
        held = {block for table in tables for block in table}
        assert set(self._idle) == set(self._key_of) - held
        for sequence in running:
            table, num_full = sequence.kv.block_table, sequence.kv.length // self.block_size
            assert all(self._pool.holders(block) == 1 for block in table[num_full:]), "shared"
            for block, key in zip(table, sequence.block_keys, strict=False):
                assert self._key_of.get(block, key) == key, "a block is known by another's key"

    def _keys_to_prefill(self, sequence: Sequence) -> list[bytes]:
        """Of all full blocks before the last committed token."""
        count = (sequence.tree.num_committed - 1) // self.block_size
        self._hash_blocks(sequence, count)
        return sequence.block_keys[:count]

    def _hash_blocks(self, sequence: Sequence, count: int) -> None:
        keys, size = sequence.block_keys, self.block_size
        if len(keys) >= count:
            return
        token_ids = sequence.tree.token_ids
        parent = keys[-1] if keys else hashlib.sha256(sequence.request.tenant.encode()).digest()
        for index in range(len(keys), count):
            tokens = array("Q", token_ids[index * size : (index + 1) * size])
            parent = hashlib.sha256(parent + tokens.tobytes()).digest()
            keys.append(parent)
