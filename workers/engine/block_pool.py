"""The pool of KV blocks: it counts who holds which block, and holds no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from paceline.errors import OverloadedError


class BlockPool:
    """Hands out block ids 0 to num_blocks - 1, and counts the holders of each.

    Several holders of a block may only read it. Not thread-safe; one owner.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # In descending order where possible: pop() then hands out ascending runs, and a sequence's
        # blocks tend to be neighbors.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """The number of blocks that nobody holds."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """The number of holders of a block."""
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


def blocks_for(num_tokens: int, block_size: int) -> int:
    """The number of blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)
