"""Slices: the tokens of one sequence that a step feeds, as a chain or as nodes of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.verification.candidates import depths_of


@dataclass(slots=True)
class Slice:
    """Tokens of one sequence to feed in a step.

    `token_ids` go to slots `start`, `start` + 1, ... of the sequence. KV of all slots before
    `start` is in the blocks of `block_table`, which also has room for the fed tokens. Logits are
    returned for the last `num_logits` fed tokens. A token's position is its slot, unless it is a
    node of a tree.

    Slots from `tree_start` on, if given, hold a tree's nodes: slot `tree_start` + i holds node i.
    `parents` has the parent of every node up to the last fed one, including those fed by earlier
    steps, so that a tree may grow over several steps. Parent 0 is the token in slot `tree_start` -
    1, parent j + 1 is node j. A node's position is `tree_start` - 1 + its depth (1 for a child of
    that token). It sees the slots before `tree_start`, its ancestors and itself.

    Bits: a chain (parents 0, 1, 2, ...) has the bits of a slice without a tree. So has a node whose
    ancestors are, and always were, in the slots of their positions. For other nodes the order of
    sums differs: in float32 their logits differ from plain ones by less than 1e-5 of the largest.
    """

    block_table: Sequence[int]
    start: int
    token_ids: Sequence[int]
    num_logits: int
    tree_start: int | None = None
    parents: tuple[int, ...] = ()


def blocks_begun(slices: Sequence[Slice], block_size: int) -> list[int]:
    """The blocks whose first slot these slices write: their old content is not needed."""
    begun: list[int] = []
    for piece in slices:
        end = piece.start + len(piece.token_ids)
        begun += piece.block_table[-(-piece.start // block_size) : -(-end // block_size)]
    return begun


def is_tree(piece: Slice) -> bool:
    """Whether the slice holds a tree that is not a chain."""
    return piece.tree_start is not None and piece.parents != tuple(range(len(piece.parents)))


def check_tree(piece: Slice) -> None:
    """Assert that `parents` names the root or an earlier node for each node."""
    if piece.tree_start is None:
        assert not piece.parents, "parents without tree_start"
        return
    end = piece.start + len(piece.token_ids)
    assert piece.tree_start > 0, "a tree hangs from a token"
    assert len(piece.parents) == end - piece.tree_start, (
        f"{len(piece.parents)} parents for nodes in slots {piece.tree_start} to {end - 1}"
    )
    for node, parent in enumerate(piece.parents):
        assert 0 <= parent <= node, f"parent {parent} of node {node} does not come before it"


KvMoves = tuple[Sequence[int], Sequence[tuple[int, int]]]
"""A sequence's block table, and pairs (from, to) of its slots, in order."""


def moved_slots(moves: Sequence[KvMoves], block_size: int) -> NDArray[np.int64]:
    """Sources and targets [2, moved] among all slots, for one copy that reads before it writes.

    Each sequence occurs once, and none writes a slot that another reads or writes.
    """
    pairs: list[tuple[int, int]] = []
    for table, of_sequence in moves:
        # Maps each slot that is written to the slot that held its content before all moves.
        origin: dict[int, int] = {}
        for source, target in of_sequence:
            origin[target] = origin.get(source, source)
        pairs += [
            (
                table[source // block_size] * block_size + source % block_size,
                table[target // block_size] * block_size + target % block_size,
            )
            for target, source in origin.items()
        ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2).T


def positions_of(piece: Slice) -> list[int]:
    end = piece.start + len(piece.token_ids)
    if piece.tree_start is None or not is_tree(piece):
        return list(range(piece.start, end))
    chain = range(piece.start, min(end, piece.tree_start))
    first_node = max(0, piece.start - piece.tree_start)
    return [*chain, *node_positions(piece)[first_node:]]


def node_positions(piece: Slice) -> list[int]:
    """The position of each node of the slice's tree, including those fed by earlier steps."""
    assert piece.tree_start is not None
    return [piece.tree_start - 1 + depth for depth in depths_of(piece.parents)[1:]]


def unrelated_slots(piece: Slice, num_slots: int) -> Tensor:
    """[fed tokens, `num_slots`]: True for tree slots that are not ancestors of the fed token.

    It is False for all slots after the token's own, since they are hidden in any case.
    """
    assert piece.tree_start is not None
    num_nodes = len(piece.parents)
    result = torch.zeros(len(piece.token_ids), num_slots, dtype=torch.bool)
    first_node = max(0, piece.start - piece.tree_start)
    first_row = len(piece.token_ids) - (num_nodes - first_node)
    end = piece.tree_start + num_nodes
    result[first_row:, piece.tree_start : end] = ~torch.from_numpy(paths_of(piece.parents))[
        first_node:
    ]
    return result


def paths_of(parents: Sequence[int]) -> NDArray[np.bool_]:
    """[nodes, nodes]: for each node, True for the nodes on the path to it, itself included."""
    paths = [0]  # the bits of an integer are a path: to write rows of an array takes longer
    for node, parent in enumerate(parents):
        paths.append(paths[parent] | 1 << node)
    width = -(-len(parents) // 8)
    rows = b"".join([path.to_bytes(width, "little") for path in paths[1:]])
    bits = np.unpackbits(np.frombuffer(rows, dtype=np.uint8), bitorder="little")
    return bits.reshape(len(parents), 8 * width)[:, : len(parents)].astype(np.bool_)
