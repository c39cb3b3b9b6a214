"""The walk down a candidate tree that the rules share which toss coins. Coins are an argument.

Production tosses them from keyed noise; the tests let them fall on every side in turn, and sum
the probabilities of what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.verification.candidates import CandidateTree


class Node(Protocol):
    """A rule at one node: arithmetic on its target and draft distributions, without coins."""

    def acceptance(self, token_id: int) -> float:
        """The probability that the child tested next is accepted, after the refusals so far."""
        ...

    def refused(self, token_id: int) -> Node:
        """The node once this child was refused."""
        ...

    def residual_V(self) -> NDArray[np.float64]:
        """What the token follows once all children were refused, up to a factor."""
        ...


class Coins(Protocol):
    """All that is random. `depth` counts the accepted candidates; a depth is visited once."""

    def order(self, depth: int, num_tests: int) -> Sequence[int]:
        """A permutation of so many tests, each equally likely."""
        ...

    def accepts(self, depth: int, number: int, probability: float) -> bool:
        """True with this probability, independent of all else; `number` counts a node's tests."""
        ...

    def token(self, depth: int, residual_V: NDArray[np.float64]) -> int:
        """A token that follows these probabilities, known up to a factor."""
        ...


Begin = Callable[[int, tuple[int, ...]], Node]
"""From a node's number and the accepted candidates up to it to the rule at that node."""


def walk(
    tree: CandidateTree, begin: Begin, coins: Coins, *, shuffled: bool
) -> tuple[tuple[int, ...], int | None]:
    """The accepted candidates, and the token after them; None where the last one has no children.

    A node's children are tested in the order of their indices, each once for every path through
    it. With `shuffled` in random order: of independent draws merged where equal the tree no longer
    knows the order, and any fixed one would favour the tokens that were drawn twice.
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
