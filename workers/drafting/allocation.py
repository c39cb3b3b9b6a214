"""Where a tree's nodes are spent: best first, over candidates that are known and expected ones.

The best tree of n nodes holds the n likeliest of all (Chen et al. 2024, "Sequoia"). A drafter that
sends each node as soon as it is drawn cannot choose afterwards (as EAGLE-2 does), so below what it
knows it supposes candidates of average chance, and fills the budget over both together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.value import value_class


@value_class(frozen=True, slots=True)
class Place:
    """Something that nodes may be spent on.

    `chance`: that it is reached. `room`: how many tokens may follow one another below it. A leaf
    (`known` False) is a node that could be fed; a known candidate could be sent.
    """

    node: int
    index: int
    chance: float
    room: int
    known: bool


@dataclass(frozen=True, slots=True)
class Allocation:
    """The leaves to feed and the candidates to send, the likeliest first."""

    feed: list[int]
    send: list[tuple[int, int]]


def allocate(
    places: Iterable[Place],
    means: Sequence[float],
    *,
    budget: int,
    together: bool,
    floor: float = 0.0,
) -> Allocation:
    """Spend `budget` nodes. `means[r]`: the chance of a child of rank r; as many as branches.

    `together`: the children of a node come all or none. Nothing with a chance below `floor`.
    """
    if budget <= 0:
        return Allocation([], [])
    choices = _Choices(places, means, together=together, floor=floor)
    feed: dict[int, None] = {}
    send: list[tuple[int, int]] = []
    while choices.heap and budget > 0:
        negative, _, cost, room, leaf, known = heapq.heappop(choices.heap)
        if cost > budget:
            continue
        budget -= cost
        if known is not None:
            send.append(known)
        elif leaf is not None:
            feed.setdefault(leaf)
        choices.push_below(-negative, room)
    return Allocation(list(feed), send)


class _Choices:
    """What the next nodes could be spent on, the likeliest first."""

    def __init__(
        self, places: Iterable[Place], means: Sequence[float], *, together: bool, floor: float
    ) -> None:
        self._means = means
        self._total = sum(means)
        self._together = together
        self._floor = floor
        self._count = 0
        # Chance, tie-break, cost, room below, origin leaf or None, known candidate or None.
        self.heap: list[tuple[float, int, int, int, int | None, tuple[int, int] | None]] = []
        candidates = []
        for place in places:
            if not place.known:
                self.push_children(place.chance, place.room, place.node)
            elif place.chance >= floor:
                self._count += 1
                known = (place.node, place.index)
                candidates.append((-place.chance, self._count, 1, place.room, None, known))
        # Of those that are known there are many, of which few are taken.
        self.heap += candidates
        heapq.heapify(self.heap)

    def push(self, chance: float, cost: int, room: int, leaf: int | None) -> None:
        """`cost` nodes that are reached with this chance, unless that is below the floor."""
        self._count += 1
        if chance >= self._floor:
            heapq.heappush(self.heap, (-chance, self._count, cost, room, leaf, None))

    def push_children(self, chance: float, room: int, leaf: int | None) -> None:
        """What is expected below a node that is reached with this chance."""
        if room <= 0:
            return
        if self._together:
            num_children = len(self._means)
            self.push(chance * self._total / num_children, num_children, room, leaf)
            return
        for mean in self._means:
            self.push(chance * mean, 1, room - 1, leaf)

    def push_below(self, chance: float, room: int) -> None:
        """What is expected below what was chosen: a node, or all the children of one."""
        if not self._together:
            self.push_children(chance, room, None)
            return
        average = self._total / len(self._means)
        for mean in self._means:
            self.push_children(chance / average * mean, room - 1, None)
