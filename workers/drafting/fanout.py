"""Fan-out: while a verdict is awaited, also drafts for outcomes other than the likeliest one.

The drafter's first candidates make a chain. The outcome may leave this chain at a position where it
has another of the drafter's likely candidates. To draft for that outcome is to send a branch: that
candidate and tokens after it. This follows SSD (Kumar et al. 2026). The drafter of SSD answers once
it has the outcome; here branches are sent as they grow.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from workers.drafting.draft_stopping import Stopper
from workers.drafting.expansions import Expansions
from workers.drafting.tree import DraftTree, Grant

RANKS = 3
"""Maximum number of candidates per position, besides the first, that get a branch."""


def most_begun(grant: Grant) -> int:
    """Maximum number of branches, besides the chain, that this drafter feeds in a pass."""
    return grant.fan_out if grant.shares < 2 else -(-grant.fan_out // 2)


# Minus the chance that it will be committed, tie-break, its parent, its index under the parent.
_Candidate = tuple[float, int, int, int]


class Frontier:
    """The edge of a tree: nodes that no pass has fed, and candidates that were drawn but not sent.

    A pass feeds a limited number of nodes: those likeliest to be committed, whether they continue
    the chain or begin a branch. Suppose the chance that rank k is right falls as k^-(1+r). Then a
    position at which the outcome leaves the chain with probability w gets F ∝ w^(1/(1+r)) branches,
    as in SSD. A candidate that is not taken competes with those drawn in the next pass.

    The object describes one state of the tree and follows its growth. After a cut, make another
    object.
    """

    def __init__(self, tree: DraftTree, drawn: Expansions) -> None:
        self._tree, self._drawn = tree, drawn
        self._reached = drawn.reached(tree)
        self._unfed = [node for node in range(tree.end + 1) if node not in drawn.of]
        self._heap: list[_Candidate] = []
        self._without_room: list[_Candidate] = []
        self._room = tree.room(0)
        self._count = 0
        self._num_likelier = 0
        # By node number: whether it is on the chain of first candidates.
        self._of_chain = [True] + [False] * tree.end
        for node in tree.chain_nodes():
            self._of_chain[node] = True
        for node in drawn.of:
            self._offer(node)
        heapify(self._heap)

    @property
    def is_whole(self) -> bool:
        """Whether it has all nodes of the tree. It lacks those that other code added."""
        return len(self._reached) == self._tree.end + 1

    @property
    def leaves(self) -> list[int]:
        return self._tree.with_room(self._unfed)

    @property
    def chance_of_leaves(self) -> float:
        """The probability that one of the leaves will be committed."""
        return min(1.0, sum([self._reached[leaf] for leaf in self.leaves]))

    def fed(self, nodes: Collection[int]) -> None:
        if nodes:
            for node in nodes:
                self._offer(node)
            heapify(self._heap)
            of = self._drawn.of
            self._unfed = [node for node in self._unfed if node not in of]

    def take(self, most: int) -> list[tuple[int, int]]:
        """At most `most` candidates (node, index) to send now, the likeliest first.

        The caller must number them in this order, from the tree's end on.
        """
        tree, heap, reached, of = self._tree, self._heap, self._reached, self._drawn.of
        if tree.room(0) != self._room:
            self._room = tree.room(0)
            for candidate in self._without_room:
                heappush(heap, candidate)
            self._without_room = []
        taken: list[tuple[int, int]] = []
        while heap and len(taken) < most:
            candidate = heappop(heap)
            negative, _, node, index = candidate
            if tree.room(node) <= 0:
                self._without_room.append(candidate)
                continue
            if index == 0 or not self._of_chain[node] or self._is_mine(node, index):
                taken.append((node, index))
                self._unfed.append(len(reached))
                reached.append(-negative)
                self._of_chain.append(index == 0 and self._of_chain[node])
            if index + 1 < len(of[node].chances):
                heappush(heap, self._candidate(node, index + 1, at_most=-negative))
        return taken

    def _offer(self, node: int) -> None:
        """Put the first unsent candidate under a node on the heap. `take` adds its next sibling."""
        nodes = self._drawn.of[node].nodes
        if None in nodes:
            self._heap.append(self._candidate(node, nodes.index(None), at_most=1.0))

    def _is_mine(self, node: int, index: int) -> bool:
        """Whether a branch off the chain is in this drafter's share (drafting.proto, Grant).

        Call it once per branch, the likeliest first.
        """
        grant = self._tree.grant
        if grant.share == 0:
            return True
        self._num_likelier += 1
        if self._num_likelier <= most_begun(grant):
            return False  # these belong to the first drafter
        length, _ = self._tree.base(node)
        return (length + index) % (grant.shares - 1) == grant.share - 1

    def _candidate(self, node: int, index: int, *, at_most: float) -> _Candidate:
        self._count += 1
        chance = self._reached[node] * self._drawn.of[node].chances[index]
        return (-min(chance, at_most), self._count, node, index)


class FanOut:
    """A way for a tree to grow (growth.py): along the chain, with branches off it."""

    def __init__(self, tree: DraftTree, drawn: Expansions, stopper: Stopper) -> None:
        self._tree, self._drawn, self._stopper = tree, drawn, stopper
        self._frontier: Frontier | None = None

    def to_feed(self, pass_ms: float) -> list[int]:
        return self._growing(self._present(), pass_ms)

    def to_send(self, fed: Sequence[int], pass_ms: float) -> list[tuple[int, int]]:
        """The candidates (node, index) to send, once the nodes `fed` were expanded.

        They are the likeliest ones, as many as the next pass can feed besides the unfed nodes.
        """
        frontier = self._present()
        frontier.fed(fed)
        most = 1 + most_begun(self._tree.grant) - len(self._growing(frontier, pass_ms))
        return frontier.take(min(most, self._tree.nodes_left))

    @property
    def chance_of_leaves(self) -> float:
        return self._present().chance_of_leaves

    def cut(self) -> None:
        self._frontier = None

    def _present(self) -> Frontier:
        if self._frontier is None or not self._frontier.is_whole:
            self._frontier = Frontier(self._tree, self._drawn)
        return self._frontier

    def _growing(self, frontier: Frontier, pass_ms: float) -> list[int]:
        """The leaves that the next pass feeds."""
        tree, stopper, leaves = self._tree, self._stopper, frontier.leaves
        if not stopper.watches:
            return leaves
        return [leaf for leaf in leaves if not stopper.stops(tree, leaf, pass_ms)]
