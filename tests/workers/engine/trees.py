"""Random trees, and the logits that their nodes must have: those of their paths, fed plainly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from workers.engine.cpu.engine import CpuEngine
from workers.engine.cuda.engine import CudaEngine
from workers.engine.slices import Slice

TOLERANCE = 1e-5
"""Tolerance of float32 logits, as a share of the largest, for sums in another order."""


@dataclass(frozen=True)
class Tree:
    """Nodes above a prefix, with parents as in Slice.parents."""

    prefix: list[int]
    node_ids: list[int]
    parents: tuple[int, ...]

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child down to `node`."""
        nodes = [node]
        while self.parents[nodes[0]]:
            nodes.insert(0, self.parents[nodes[0]] - 1)
        return nodes

    def ids_to(self, node: int) -> list[int]:
        return [*self.prefix, *(self.node_ids[step] for step in self.path(node))]

    def piece(self, table: Sequence[int], start: int, end_node: int, num_logits: int) -> Slice:
        """A slice that feeds from slot `start` up to before node `end_node`."""
        ids = [*self.prefix, *self.node_ids[:end_node]][start:]
        length = len(self.prefix)
        return Slice(table, start, ids, num_logits, length, self.parents[:end_node])


def random_tree(seed: int, *, prefix_length: int, num_nodes: int, vocab_size: int) -> Tree:
    generator = random.Random(seed)
    return Tree(
        [generator.randrange(vocab_size) for _ in range(prefix_length)],
        [generator.randrange(vocab_size) for _ in range(num_nodes)],
        # Mostly near the end, so that trees are both deep and wide.
        tuple(generator.randint(max(0, node - 3), node) for node in range(num_nodes)),
    )


def plain_rows(engine: CpuEngine | CudaEngine, tree: Tree, table: Sequence[int]) -> torch.Tensor:
    """Each node's logits if its path is fed as a chain, in its own blocks."""
    rows = []
    length = len(tree.prefix)
    engine.step([Slice(table, 0, tree.prefix, 0)])
    for node in range(len(tree.node_ids)):
        path = tree.ids_to(node)[length:]
        rows.append(engine.step([Slice(table, length, path, 1)]))
    return torch.cat(rows)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).abs().max() <= TOLERANCE * right.abs().max())


def multiply_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies as numpy does, where a row's bits depend on its place."""

    def multiply(left: Any, right: Any, dtype: Any) -> Any:
        products = left.astype(dtype)[:, None, :] * right.astype(dtype).T[None, :, :]
        return np.ascontiguousarray(products).sum(axis=-1)

    monkeypatch.setattr(np, "matmul", multiply)
