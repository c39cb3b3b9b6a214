"""The KV blocks of a target group, and which sequences may read them.

Sequences share full blocks of committed tokens, which are never written again. How blocks are named
and evicted is in workers/engine/kv_blocks.py, which drafters use as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Keys

from cluster.decoding.sequence import Sequence
from workers.engine.kv_blocks import BlockKeys, KvKind, SharedBlocks, blocks_for


class PrefixCache(SharedBlocks):
    """The block pool of a target, and the keys of computed blocks."""

    def __init__(self, num_blocks: int, kind: KvKind, *, enabled: bool = True) -> None:
        super().__init__(num_blocks)
        self.block_size = kind.block_size
        self._kind = kind
        self._enabled = enabled

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's blocks. Its block table stays as it is."""
        self.let_go(sequence.kv.block_table)

    def adopt(self, sequence: Sequence) -> None:
        """Give a sequence that has not begun the cached blocks of its first tokens.

        The last committed token is left out, since its logits must be computed.
        """
        if not self._enabled:
            return
        table = sequence.kv.block_table
        keys, count = self._keys_to_prefill(sequence)
        while len(table) < count and (block := self.hold(keys[len(table)])) is not None:
            table.append(block)
        sequence.kv.length = len(table) * self.block_size

    def keep(self, sequence: Sequence) -> None:
        """Offer the sequence's full blocks of committed tokens to other sequences."""
        if not self._enabled:
            return
        held = sequence.kv
        verified = int(min(held.length, held.plain_until)) // self.block_size
        if verified <= held.blocks_kept:
            return
        keys = self._keys_of(sequence, verified)
        for index in range(held.blocks_kept, verified):
            block = held.block_table[index]
            self.offer(keys[index], block, tenant=sequence.request.tenant)
        held.blocks_kept = verified

    def forget(self, sequence: Sequence) -> None:
        """Stop sharing the sequence's blocks, because they may hold NaN."""
        self.take_back(sequence.kv.block_table)

    def wanted(self, sequence: Sequence, length: int) -> int:
        """Free blocks that a sequence still takes until it has `length` positions."""
        lacking = blocks_for(length, self.block_size) - len(sequence.kv.block_table)
        if not self._enabled or sequence.kv.open_at_target:
            return lacking
        keys, count = self._keys_to_prefill(sequence)
        for index in range(len(sequence.kv.block_table), count):
            if not self.knows(keys[index]):
                break
            lacking -= not self.is_idle(keys[index])  # Others hold the block: it takes no room.
        return lacking

    def num_known(self, sequence: Sequence) -> int:
        """Blocks of a sequence that has not begun that need not be computed."""
        keys, count = self._keys_to_prefill(sequence) if self._enabled else ((), 0)
        return next((i for i in range(count) if not self.knows(keys[i])), count)

    def key_at(self, sequence: Sequence, index: int) -> bytes | None:
        """The key of the block at `index` of the sequence's table.

        None: the block is computed already or cannot be shared.
        """
        if not self._enabled or index < sequence.kv.length // self.block_size:
            return None
        keys, count = self._keys_to_prefill(sequence)
        return keys[index] if index < count else None

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that blocks are not leaked, and not written by one sequence while others read."""
        self.check_tables(
            (one.kv.block_table, one.kv.length // self.block_size, self._keys_of(one, 0))
            for one in sequences
        )

    def _keys_to_prefill(self, sequence: Sequence) -> tuple[Keys[bytes], int]:
        """Keys, and how many of them belong to full blocks before the last committed token.

        None do if the caller wants log probabilities of the prompt, whose rows must be computed.
        """
        if sequence.lacks_prompt_logprobs:
            return (), 0
        count = (sequence.tree.num_committed - 1) // self.block_size
        return self._keys_of(sequence, count), count

    def _keys_of(self, sequence: Sequence, count: int) -> Keys[bytes]:
        """At least the first `count` keys of a sequence. They depend on the target's KvKind."""
        keys = sequence.block_keys
        if keys is None or keys.kind != self._kind:
            keys = sequence.block_keys = BlockKeys(self._kind, tenant=sequence.request.tenant)
        return keys.first(count, sequence.tree.token_ids)
