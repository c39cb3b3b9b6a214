"""The sequences whose KV a drafter holds on its own device, and the pool they share.

Unlike the target, whose blocks belong to the scheduler, a drafter keeps its own books.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workers.engine.block_pool import BlockPool, blocks_for
from workers.engine.slices import Slice

MoveKV = Callable[[Sequence[int], Sequence[tuple[int, int]]], None]
"""Engine.move_kv."""


class LocalSequence:
    """Token ids of a sequence, its blocks, and for how many of its tokens KV is stored.

    Above the chain of tokens there may be a tree: its nodes take the slots after the chain, in the
    order in which they were grown, and its parents are those of Slice.parents.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.token_ids: list[int] = []
        self.block_table: list[int] = []
        self.num_stored = 0
        """KV is stored for the first so many tokens and, after all of them, nodes."""
        self.node_ids: list[int] = []
        self.parents: list[int] = []

    def __len__(self) -> int:
        """Tokens of the chain."""
        return len(self.token_ids)

    @property
    def num_slots(self) -> int:
        """Tokens of the chain and nodes of the tree."""
        return len(self.token_ids) + len(self.node_ids)

    @property
    def num_pending(self) -> int:
        """Tokens and nodes that have no KV yet."""
        return self.num_slots - self.num_stored

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens, whose KV is still missing. Raises OverloadedError, changing nothing.

        Not while there is a tree: promote a path of it or drop it first.
        """
        assert not self.node_ids, "a tree hangs from the last token"
        self._reserve(len(token_ids))
        self.token_ids.extend(token_ids)

    def grow(self, token_ids: Sequence[int], parents: Sequence[int]) -> int:
        """Add nodes to the tree; returns the first one's number. Parents as in Slice.parents.

        Raises OverloadedError, changing nothing.
        """
        first = len(self.node_ids)
        assert self.token_ids, "a tree hangs from a token"
        assert all(0 <= parent <= first + i for i, parent in enumerate(parents)), parents
        self._reserve(len(token_ids))
        self.node_ids.extend(token_ids)
        self.parents.extend(parents)
        assert len(self.node_ids) == len(self.parents), "a parent for each node"
        return first

    def promote(self, path: Sequence[int], move_kv: MoveKV) -> None:
        """Make nodes part of the chain and drop the others.

        `path` goes from a child of the last token downwards, each node a child of the one before.
        KV of nodes that have some is moved by `move_kv` to the slots of their positions.
        """
        assert [self.parents[node] for node in path] == [0, *(node + 1 for node in path)][:-1], path
        length = len(self.token_ids)
        moves = [
            (length + node, length + depth)
            for depth, node in enumerate(path)
            if length + node < self.num_stored
        ]
        if any(source != target for source, target in moves):
            move_kv(self.block_table, moves)
        self.token_ids.extend(self.node_ids[node] for node in path)
        self.num_stored = min(self.num_stored, length + len(moves))
        self.drop_tree()

    def drop_tree(self) -> None:
        """Keep the chain alone."""
        self.truncate_to(len(self.token_ids))

    def truncate_to(self, position: int) -> None:
        """Keep the first `position` tokens and no tree; blocks that hold none go to the pool."""
        assert 0 <= position <= len(self.token_ids), (position, len(self.token_ids))
        del self.token_ids[position:]
        self.node_ids.clear()
        self.parents.clear()
        self.num_stored = min(self.num_stored, position)
        keep = blocks_for(position, self._block_size)
        self._pool.free(self.block_table[keep:])
        del self.block_table[keep:]

    def pending_slice(self, *, num_logits: int = 1, limit: int | None = None) -> Slice:
        """The slice that stores KV of pending tokens and nodes, at most `limit` of them.

        Logits are asked for only if the slice reaches the last token, or node if there is a tree.
        After the step that feeds it, call `mark_stored` with the slice's length.
        """
        end, length = self.num_slots, len(self.token_ids)
        if limit is not None:
            end = min(end, self.num_stored + limit)
        fed = self.token_ids[self.num_stored : end]
        fed += self.node_ids[max(0, self.num_stored - length) : max(0, end - length)]
        wanted = num_logits if end == self.num_slots else 0
        parents = tuple(self.parents[: max(0, end - length)])
        return Slice(
            self.block_table,
            self.num_stored,
            fed,
            min(wanted, len(fed)),
            tree_start=length if parents else None,
            parents=parents,
        )

    def mark_stored(self, count: int) -> None:
        """KV of the next `count` tokens and nodes is stored now."""
        assert self.num_stored + count <= self.num_slots
        self.num_stored += count

    def _reserve(self, count: int) -> None:
        """Blocks for `count` more slots. Raises OverloadedError, changing nothing."""
        missing = blocks_for(self.num_slots + count, self._block_size) - len(self.block_table)
        if missing > 0:
            self.block_table.extend(self._pool.allocate(missing))


class LocalCache:
    """The open sequences of a device, by any hashable name the caller gives them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._sequences: dict[object, LocalSequence] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.num_free

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
            needed = blocks_for(sequence.num_slots, self._block_size)
            assert len(sequence.block_table) == needed
            assert 0 <= sequence.num_stored <= sequence.num_slots
            assert len(sequence.parents) == len(sequence.node_ids)
            assert all(0 <= parent <= node for node, parent in enumerate(sequence.parents))
