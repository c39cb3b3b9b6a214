"""The walk down a candidate tree, shared by the rules that toss coins. Coins are an argument.

Production tosses them from keyed noise. The tests let them fall on every side in turn, and sum the
probabilities of the outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.verification.candidates import CandidateTree
from workers.verification.rule import Node


class Coins(Protocol):
    """All that is random. `depth` counts the accepted candidates; each depth is visited once."""

    def order(self, depth: int, num_tests: int) -> Sequence[int]:
        """A uniformly random permutation of `num_tests` tests."""
        ...

    def accepts(self, depth: int, number: int, probability: float) -> bool:
        """True with this probability, independent of all else. `number` counts a node's tests."""
        ...

    def token(self, depth: int, residual_V: NDArray[np.float64]) -> int:
        """A token drawn from these probabilities, which need not be normalized."""
        ...


Begin = Callable[[int, tuple[int, ...]], Node]
"""Maps a node's number, and the accepted candidates up to it, to the rule at that node."""


def walk(
    tree: CandidateTree, begin: Begin, coins: Coins, *, shuffled: bool
) -> tuple[tuple[int, ...], int | None]:
    """The accepted candidates, and the token after them; None if the last one has no children.

    A node's children are tested in the order of their indices, once for every path through each.
    With `shuffled` the order is random: if independent draws were merged where equal, the tree does
    not know their order, and any fixed order would favor tokens that were drawn twice.
    """
    accepted: list[int] = []
    node = 0
    while tests := tree.copies(node):
        depth = len(accepted)
        if shuffled and len(tests) > 1:
            tests = tuple(tests[i] for i in coins.order(depth, len(tests)))
        at_node = begin(node, tuple(accepted))
        for number, child in enumerate(tests):
            token_id = tree.token_ids[child]
            if coins.accepts(depth, number, at_node.acceptance(token_id)):
                break
            at_node = at_node.refused(token_id)
        else:
            return tuple(accepted), coins.token(depth, at_node.residual_V())
        accepted.append(child)
        node = child + 1
    return tuple(accepted), None
