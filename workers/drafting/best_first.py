"""Trees that grow best first: the grant's nodes go to the candidates likeliest to be committed.

The best tree of n nodes has the n likeliest nodes (Chen et al. 2024, "Sequoia"). EAGLE-2 chooses
among all nodes after the last pass. This drafter sends each node as soon as it is drawn, so it
cannot. Instead it expects candidates of average chance below those it has drawn, and spends the
budget of nodes over drawn and expected candidates together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter

from workers.drafting.chances import RankChances
from workers.drafting.draft_stopping import Stopper
from workers.drafting.expansions import Expansions
from workers.drafting.tree import DraftTree
from workers.verification.rule import rule_named


class BestFirst:
    """A way for a tree to grow (growth.py)."""

    def __init__(
        self, tree: DraftTree, drawn: Expansions, chances: RankChances, stopper: Stopper
    ) -> None:
        self._tree, self._drawn, self._chances, self._stopper = tree, drawn, chances, stopper
        self._shares_noise = rule_named(tree.spec.rule).shares_noise
        self._ends: LooseEnds | None = None

    def to_feed(self, pass_ms: float) -> list[int]:
        return self._allocate(pass_ms).feed

    def to_send(self, fed: Sequence[int], pass_ms: float) -> list[tuple[int, int]]:
        """The candidates (node, index) to send, once the nodes `fed` were expanded.

        Candidates with shared noise may be sent later. Under other rules all siblings are sent at
        once: otherwise the rule would not be exact.
        """
        if not self._shares_noise:
            return self._drawn.under(fed)
        chosen = self._allocate(pass_ms, fed).send
        self._loose_ends().sent(chosen)
        return chosen

    def cut(self) -> None:
        self._ends = None

    def check_integrity(self) -> None:
        if self._ends is not None:
            self._ends.check_integrity()

    def _allocate(self, pass_ms: float, fed: Sequence[int] = ()) -> Allocation:
        """Decide where to spend nodes now. `fed`: the nodes expanded since the last call."""
        tree, stopper, ends = self._tree, self._stopper, self._loose_ends(fed)
        means = [self._chances.mean(rank) for rank in range(tree.grant.branches)]
        leaves = ends.leaves
        if stopper.watches:
            leaves = [leaf for leaf in leaves if not stopper.stops(tree, leaf.node, pass_ms)]
        # A leaf that the stopping rule refused is better than any less likely candidate.
        floor = max((ends.reached[node] * means[0] for node in stopper.stopped), default=0.0)
        return allocate(
            leaves,
            ends.known,
            means,
            budget=tree.nodes_left,
            together=not self._shares_noise,
            floor=floor,
        )

    def _loose_ends(self, fed: Sequence[int] = ()) -> LooseEnds:
        """The loose ends, including the candidates drawn under `fed`."""
        if self._ends is not None and fed:
            self._ends.fed(fed)
        if self._ends is None or not self._ends.are_all:
            self._ends = LooseEnds(self._tree, self._drawn)
        return self._ends


class LooseEnds:
    """Nodes that no pass has fed, and candidates that were drawn but not sent.

    The object describes one state of the tree under one grant. Call `fed` and `sent` when a pass
    adds to the tree. After a cut or a new grant, make another object.
    """

    def __init__(self, tree: DraftTree, drawn: Expansions) -> None:
        self._tree, self._drawn, self._grant = tree, drawn, tree.grant
        self.reached = drawn.reached(tree)
        """The probability of each node, the root included, that it will be committed."""
        self.known: list[Known] = []
        """Candidates that were drawn but not sent, the likeliest first."""
        self._unfed = [node for node in range(tree.end + 1) if node not in drawn.of]
        self._num_offered = self._num_fed = 0
        # Candidates beyond the grant's `branches` were drawn for fan-out only.
        self._width = tree.grant.branches if rule_named(tree.spec.rule).shares_noise else None
        self._offer(drawn.of)

    @property
    def are_all(self) -> bool:
        """Whether it describes the present state: no new grant, no nodes added by other code."""
        return (
            self._grant is self._tree.grant
            and len(self.reached) == self._tree.end + 1
            and self._num_fed == len(self._drawn.of)
        )

    @property
    def leaves(self) -> list[Leaf]:
        """Nodes that a pass could feed."""
        room, reached, copies = self._tree.room, self.reached, self._drawn.copies
        return [
            Leaf(node, reached[node], room(node))
            for node in self._unfed
            if node not in copies and room(node) > 0
        ]

    def fed(self, nodes: Sequence[int]) -> None:
        """Note that `nodes` were fed and their candidates drawn."""
        self._offer(nodes)
        of = self._drawn.of
        self._unfed = [node for node in self._unfed if node not in of]

    def sent(self, chosen: Sequence[tuple[int, int]]) -> None:
        """Note that `chosen`, the likeliest candidates, are the next nodes of the tree."""
        for (negative, _, _, candidate), one in zip(self.known, chosen, strict=False):
            assert candidate == one, "a likelier candidate was not sent"
            self._unfed.append(len(self.reached))
            self.reached.append(-negative)
        del self.known[: len(chosen)]

    def check_integrity(self) -> None:
        """Assert that it equals a new one made from the tree's present state."""
        if self.are_all:
            now = LooseEnds(self._tree, self._drawn)
            assert (self.reached, self.leaves) == (now.reached, now.leaves), "other leaves"
            places = [[place for _, _, _, place in one.known] for one in (self, now)]
            assert places[0] == places[1], "other candidates, or in another order"

    def _offer(self, nodes: Iterable[int]) -> None:
        """Add the candidates under nodes that were fed."""
        known, count = self.known, self._num_offered
        for node in nodes:
            self._num_fed += 1
            room = self._tree.room(node) - 1
            if room < 0:
                continue
            expansion, reached = self._drawn.of[node], self.reached[node]
            for index, chance in enumerate(expansion.chances[: self._width]):
                if expansion.nodes[index] is None:
                    known.append((-reached * chance, count, room, (node, index)))
                    count += 1
        self._num_offered = count
        known.sort()


@dataclass(slots=True)
class Leaf:
    """A node that a pass could feed.

    `chance`: the probability that the node will be committed. `room`: the largest number of tokens,
    one after another, that may follow it.
    """

    node: int
    chance: float
    room: int


Known = tuple[float, int, int, tuple[int, int]]
"""A candidate that could be sent: minus its chance to be committed, a tie-break, the room below it,
and its place (node, index).
"""
_Expected = tuple[float, int, int, int, float, int | None]
"""An expected candidate: minus its chance, tie-break, room below it, rank among its siblings, minus
its parent's chance, and the leaf that is its parent (None if the parent is not a leaf).
"""

_AFTER_KNOWN = 1 << 32
"""Tie-breaks of expected candidates start here; those of known candidates are lower."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The leaves to feed and the candidates (node, index) to send, the likeliest first."""

    feed: list[int]
    send: list[tuple[int, int]]


def allocate(
    leaves: Sequence[Leaf],
    known: Sequence[Known],
    means: Sequence[float],
    *,
    budget: int,
    together: bool,
    floor: float = 0.0,
) -> Allocation:
    """Spend `budget` nodes on the likeliest candidates, known or expected.

    `known` is sorted, with tie-breaks from 0 on. `means[r]` is the chance of a child of rank r, and
    `len(means)` is the number of branches. `together`: a node gets all its children or none,
    and they are sent at once, so none is known. A candidate less likely than `floor` gets no node.
    """
    if budget <= 0:
        return Allocation([], [])
    if together:
        return Allocation(_families_to_feed(leaves, means, budget, floor), [])
    return _spend_on_nodes(leaves, known, sorted(means, reverse=True), budget, floor)


def _spend_on_nodes(
    leaves: Sequence[Leaf],
    known: Sequence[Known],
    means: Sequence[float],
    budget: int,
    floor: float,
) -> Allocation:
    """Spend nodes one by one. `means` is in descending order.

    Of expected siblings, the heap has only the likeliest that is left. Among equal chances, the
    children of leaves come first, then known candidates, then candidates expected below others;
    each group keeps its order.
    """
    feed: dict[int, None] = {}
    send: list[tuple[int, int]] = []
    width, first, most = len(means), means[0], -floor
    heap: list[_Expected] = []
    order = -width * len(leaves)
    for leaf in leaves:
        negative = -leaf.chance * first
        if leaf.room > 0 and negative <= most:
            heap.append((negative, order, leaf.room - 1, 0, -leaf.chance, leaf.node))
        order += width
    heapify(heap)
    num_known, order = bisect_right(known, most, key=itemgetter(0)), _AFTER_KNOWN
    for _ in range(budget):
        place = len(send)
        if place < num_known and not (heap and heap[0][:2] < known[place][:2]):
            negative, _, room, candidate = known[place]
            send.append(candidate)
        elif heap:
            negative, number, room, rank, above, fed = heap[0]
            if fed is not None:
                feed.setdefault(fed)
            rank += 1
            if rank < width and above * means[rank] <= most:
                sibling = (above * means[rank], number + 1, room, rank, above, fed)
                heapreplace(heap, sibling)
            else:
                heappop(heap)
        else:
            break
        if room > 0 and negative * first <= most:
            heappush(heap, (negative * first, order, room - 1, 0, negative, None))
        order += width
    return Allocation(list(feed), send)


def _families_to_feed(
    leaves: Iterable[Leaf], means: Sequence[float], budget: int, floor: float
) -> list[int]:
    """The leaves to feed if nodes are spent on whole families.

    The likeliest families come first, those expected below the children of a chosen one included.
    """
    width, average = len(means), sum(means) / len(means)
    # Minus the chance, tie-break, room below, and the leaf; None: an expected node.
    heap: list[tuple[float, int, int, int | None]] = []
    count = 0

    def push(chance: float, room: int, leaf: int | None) -> None:
        nonlocal count
        chance = chance * sum(means) / width
        count += 1
        if room > 0 and chance >= floor:
            heappush(heap, (-chance, count, room, leaf))

    for leaf in leaves:
        push(leaf.chance, leaf.room, leaf.node)
    feed: list[int] = []
    while heap and budget >= width:
        negative, _, room, node = heappop(heap)
        budget -= width
        if node is not None:
            feed.append(node)
        for mean in means:
            push(-negative / average * mean, room - 1, None)
    return feed
