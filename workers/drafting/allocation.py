"""Where a tree's nodes are spent: best first, over known and expected candidates.

The best tree of n nodes holds the n likeliest nodes (Chen et al. 2024, "Sequoia"). A drafter that
sends each node as soon as it is drawn cannot choose afterwards, as EAGLE-2 does. So it assumes
candidates of average chance below the known ones, and spends the budget over both together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter


@dataclass(slots=True)
class Leaf:
    """A node that could be fed.

    `chance`: the probability that it is reached. `room`: the largest depth of a chain below it.
    """

    node: int
    chance: float
    room: int


Known = tuple[float, int, int, tuple[int, int]]
"""A candidate that could be sent: minus the chance that it is reached, a tie-break, the room below
it, and its place (node, index).
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

    `known` is sorted, with tie-breaks from 0 on. `means[r]` is the chance of a child of rank r; its
    length is the number of branches. `together`: the children of a node come all or none. A
    candidate whose chance is below `floor` gets nothing.
    """
    if budget <= 0:
        return Allocation([], [])
    if together:
        return _spend_on_families(leaves, known, means, budget, floor)
    return _spend_on_nodes(leaves, known, sorted(means, reverse=True), budget, floor)


def _spend_on_nodes(
    leaves: Sequence[Leaf],
    known: Sequence[Known],
    means: Sequence[float],
    budget: int,
    floor: float,
) -> Allocation:
    """Spend nodes one by one. `means` is in descending order.

    The heap holds only the likeliest remaining one of the expected siblings. Among equal chances,
    the children of leaves come first, then known candidates, then those expected below others, each
    in order.
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


def _spend_on_families(
    leaves: Iterable[Leaf],
    known: Iterable[Known],
    means: Sequence[float],
    budget: int,
    floor: float,
) -> Allocation:
    """Spend nodes on whole families: the children of a node come all or none."""
    families = _Families(leaves, known, means, floor)
    feed: dict[int, None] = {}
    send: list[tuple[int, int]] = []
    while families.heap and budget > 0:
        negative, _, cost, room, leaf, candidate = heappop(families.heap)
        if cost > budget:
            continue
        budget -= cost
        if candidate is not None:
            send.append(candidate)
        elif leaf is not None:
            feed.setdefault(leaf)
        families.push_below(-negative, room)
    return Allocation(list(feed), send)


class _Families:
    """The families and known candidates that nodes could be spent on, the likeliest first."""

    def __init__(
        self,
        leaves: Iterable[Leaf],
        known: Iterable[Known],
        means: Sequence[float],
        floor: float,
    ) -> None:
        self._means = means
        self._average = sum(means) / len(means)
        self._floor = floor
        self._count = 0
        # Minus the chance, tie-break, cost, room below, leaf or None, known candidate or None.
        self.heap: list[tuple[float, int, int, int, int | None, tuple[int, int] | None]] = []
        for leaf in leaves:
            self._push(leaf.chance, leaf.room, leaf.node)
        for negative, _, room, candidate in known:
            self._count += 1
            if -negative >= floor:
                heappush(self.heap, (negative, self._count, 1, room, None, candidate))

    def push_below(self, chance: float, room: int) -> None:
        """Add the families expected below the children of a family that was chosen."""
        for mean in self._means:
            self._push(chance / self._average * mean, room - 1, None)

    def _push(self, chance: float, room: int, leaf: int | None) -> None:
        """Add the family expected below a node that is reached with probability `chance`."""
        chance = chance * sum(self._means) / len(self._means)
        self._count += 1
        if room > 0 and chance >= self._floor:
            heappush(self.heap, (-chance, self._count, len(self._means), room, leaf, None))
