"""The pool of KV blocks: who may write where. It counts; it holds no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.errors import OverloadedError


class BlockPool:
    """Hands out block ids 0 to num_blocks - 1. Not thread-safe; one owner."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Kept in descending order where possible, so that pop() hands out ascending runs and a
        # sequence's blocks tend to be neighbours.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises OverloadedError, taking none, when fewer are free."""
        if count > len(self._free):
            raise OverloadedError(f"{count} KV blocks wanted, {len(self._free)} free")
        return [self._free.pop() for _ in range(count)]

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Each must have been allocated and not freed since."""
        self._free.extend(reversed(blocks))

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that every block is either free or in one of the block tables in `held`, once."""
        seen = sorted([*self._free, *(block for table in held for block in table)])
        assert seen == list(range(self.num_blocks)), (
            f"KV blocks leaked or shared: {len(seen)} counted of {self.num_blocks}, "
            f"{len(set(seen))} distinct"
        )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` positions."""
    return -(-num_tokens // block_size)
