"""Where a tree's nodes are spent: best first, over candidates that are known and expected ones.

The best tree of n nodes holds the n likeliest of all (Chen et al. 2024, "Sequoia"). A drafter that
sends each node as soon as it is drawn cannot choose afterwards (as EAGLE-2 does), so below what it
knows it supposes candidates of average chance, and fills the budget over both together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
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
    # Entries: chance, tie-break, cost, room below, origin leaf or None, known candidate or None.
    heap: list[tuple[float, int, int, int, int | None, tuple[int, int] | None]] = []
    count = 0

    def push(
        chance: float, cost: int, room: int, leaf: int | None, known: tuple[int, int] | None = None
    ) -> None:
        nonlocal count
        count += 1
        if chance >= floor:
            heapq.heappush(heap, (-chance, count, cost, room, leaf, known))

    def push_children(chance: float, room: int, leaf: int | None) -> None:
        if room <= 0:
            return
        if together:
            push(chance * sum(means) / len(means), len(means), room, leaf)
            return
        for mean in means:
            push(chance * mean, 1, room - 1, leaf)

    for place in places:
        if place.known:
            push(place.chance, 1, place.room, None, (place.node, place.index))
        else:
            push_children(place.chance, place.room, place.node)
    feed: dict[int, None] = {}
    send: list[tuple[int, int]] = []
    while heap and budget > 0:
        negative, _, cost, room, leaf, known = heapq.heappop(heap)
        if cost > budget:
            continue
        budget -= cost
        if known is not None:
            send.append(known)
        elif leaf is not None:
            feed.setdefault(leaf)
        if together:
            average = sum(means) / len(means)
            for mean in means:
                push_children(-negative / average * mean, room - 1, None)
        else:
            push_children(-negative, room, None)
    return Allocation(list(feed), send)
