"""The pool of KV blocks: counts the holders of each block, and finds blocks by their content.

Only ids of blocks are handled here; the engines have the tensors (cpu/kv_cache.py,
cuda/kv_cache.py).

The KV of equal prefixes is computed once. A block's key is a hash of all tokens up to its end, of
its tenant and of the kind of KV. So equal prefixes of one tenant and kind have equal keys, and
others have not. A known block that no sequence holds is kept until its memory is needed. Then the
tenant with the most such blocks loses the one that was unused for the longest time, so that one
tenant cannot evict the blocks of all others. A sequence that offers a block promises that no one
will write to it again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from paceline.errors import OverloadedError


def blocks_for(num_tokens: int, block_size: int) -> int:
    """The number of blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Hands out block ids 0 to num_blocks - 1, and counts the holders of each.

    A block with several holders is read only. Not thread-safe; the pool has one owner.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # In descending order where possible: pop() then hands out ascending ids, so that a
        # sequence's blocks are often neighbors.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises OverloadedError, and takes none, if fewer are free."""
        if count > len(self._free):
            raise OverloadedError(f"{count} KV blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Add one holder to a block that is held."""
        assert self._holders[block] > 0, f"block {block} is free and cannot be shared"
        self._holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Remove one holder from each of `blocks`. The caller must be one of them."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} was freed twice"
            if self._holders[block] == 0:
                self._free.append(block)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that each block is free, or held as often as it occurs in the tables of `held`."""
        counted = [0] * self.num_blocks
        for block in chain.from_iterable(held):
            counted[block] += 1
        if counted != self._holders:
            pairs = enumerate(zip(counted, self._holders, strict=True))
            wrong = [block for block, (tables, holders) in pairs if tables != holders]
            raise AssertionError(
                f"KV blocks leaked or shared by mistake: {wrong} of {self.num_blocks}"
            )
        free = set(self._free)
        assert len(free) == len(self._free) == counted.count(0), "a block is not free just once"
        assert not any(map(counted.__getitem__, free)), "a block is free and held"


@dataclass(frozen=True, slots=True)
class KvKind:
    """The facts that determine a block's KV besides its tokens. Blocks of two kinds never match.

    `block_size`: positions of a block. `dtype`: the dtype of the computation. `checkpoint_digest`:
    the digest of the files (target.proto).
    """

    block_size: int
    dtype: str = ""
    checkpoint_digest: bytes = b""


class BlockKeys:
    """SHA-256 keys of the full blocks of one text, for one kind of KV. Computed on demand."""

    __slots__ = ("_keys", "_parent", "kind", "tenant")

    def __init__(self, kind: KvKind, *, tenant: str) -> None:
        self.kind = kind
        self.tenant = tenant
        self._keys: list[bytes] = []
        made_of = (kind.block_size, kind.dtype, kind.checkpoint_digest, tenant)
        self._parent = hashlib.sha256(repr(made_of).encode()).digest()

    def first(self, count: int, token_ids: Sequence[int]) -> Sequence[bytes]:
        """The keys of the first `count` blocks of `token_ids`, and of any computed before."""
        keys, size, parent = self._keys, self.kind.block_size, self._parent
        for index in range(len(keys), count):
            tokens = array("Q", token_ids[index * size : (index + 1) * size])
            parent = hashlib.sha256(parent + tokens.tobytes()).digest()
            keys.append(parent)
        self._parent = parent
        return keys

    @property
    def known(self) -> Sequence[bytes]:
        return self._keys


class SharedBlocks:
    """The blocks 0 to num_blocks - 1: free, held, or kept for their content."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._tenant_of: dict[int, str] = {}
        # Blocks that only the cache holds, by tenant, the longest unused first.
        self._idle: dict[str, OrderedDict[int, None]] = {}
        self._num_idle = 0

    @property
    def num_available(self) -> int:
        """The number of blocks that can be allocated: free, or held by the cache only."""
        return self._pool.num_free + self._num_idle

    def check_room(self, count: int) -> None:
        """Raise OverloadedError if fewer than `count` blocks are available. Takes none."""
        if count > self.num_available:
            raise OverloadedError(f"{count} KV blocks wanted, {self.num_available} free")

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks to write to, evicting known blocks if necessary.

        If fewer are available, raises OverloadedError, and evicts and takes none.
        """
        self.check_room(count)
        for _ in range(count - self._pool.num_free):
            most = max(self._idle.values(), key=len)
            block = next(iter(most))
            self._no_longer_idle(block)
            del self._block_of[self._key_of.pop(block)]
            self._pool.free([block])
        return self._pool.allocate(count)

    def let_go(self, blocks: Sequence[int]) -> None:
        """Remove one holder from each block of a sequence, given in the order of its table."""
        # A block is useless without those before it, but not the reverse. So the last block
        # becomes idle first, and is evicted first.
        for block in reversed(blocks):
            self._pool.free([block])
            if block in self._key_of and self._pool.holders(block) == 1:
                self._idle.setdefault(self._tenant_of[block], OrderedDict())[block] = None
                self._num_idle += 1

    def knows(self, key: bytes) -> bool:
        """Whether a block is known by this key."""
        return key in self._block_of

    def hold(self, key: bytes) -> int | None:
        """The block known by `key`, with one more holder, or None."""
        block = self._block_of.get(key)
        if block is not None:
            if self._is_idle(block):
                self._no_longer_idle(block)
            self._pool.share(block)
        return block

    def offer(self, key: bytes, block: int, *, tenant: str) -> None:
        """Make a block known by a key. Its holder must not write to it again."""
        if key not in self._block_of:  # otherwise another sequence has offered an equal block
            self._pool.share(block)
            self._block_of[key] = block
            self._key_of[block] = key
            self._tenant_of[block] = tenant

    def take_back(self, blocks: Iterable[int]) -> None:
        """Make these blocks, which are held, unknown."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
                self._pool.free([block])

    def is_idle(self, key: bytes) -> bool:
        """Whether no sequence holds the known block of this key."""
        return self._is_idle(self._block_of[key])

    def _is_idle(self, block: int) -> bool:
        return block in self._idle.get(self._tenant_of[block], ())

    def _no_longer_idle(self, block: int) -> None:
        tenant = self._tenant_of[block]
        del self._idle[tenant][block]
        if not self._idle[tenant]:
            del self._idle[tenant]
        self._num_idle -= 1

    def check_tables(self, tables: Iterable[tuple[Sequence[int], int, Sequence[bytes]]]) -> None:
        """Assert that no block is leaked, or written by one sequence while others read it.

        `tables` has for each sequence its block table, its number of full blocks, and its known
        keys.
        """
        running = list(tables)
        self._pool.check_integrity([*(table for table, _, _ in running), list(self._key_of)])
        assert {block: key for key, block in self._block_of.items()} == self._key_of
        held = {block for table, _, _ in running for block in table}
        idle = [block for blocks in self._idle.values() for block in blocks]
        assert set(idle) == set(self._key_of) - held
        assert len(idle) == self._num_idle
        assert all(self._idle.values()), "a tenant is remembered that keeps nothing"
        for table, num_full, keys in running:
            assert all(self._pool.holders(block) == 1 for block in table[num_full:]), "shared"
            for block, key in zip(table, keys, strict=False):
                assert self._key_of.get(block, key) == key, "a block is known by another's key"
