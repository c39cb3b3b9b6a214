"""Nodes are spent best first, and never more than there are."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.drafting.best_first import Allocation, Known, Leaf, allocate
from workers.drafting.chances import RankChances, coupled_prior, drawn_prior

LEAF = Leaf(0, 1.0, 8)


def candidates(*chances: float, room: int = 5) -> list[Known]:
    return sorted((-chance, index, room, (0, index)) for index, chance in enumerate(chances))


def test_a_sure_first_child_makes_a_chain() -> None:
    found = allocate([], candidates(0.9, 0.05), [0.9, 0.05], budget=4, together=False)
    assert found.send == [(0, 0)]


def test_doubtful_first_children_make_the_tree_wide() -> None:
    found = allocate([], candidates(0.4, 0.35), [0.5, 0.2], budget=3, together=False)
    assert found.send == [(0, 0), (0, 1)]


def test_nothing_grows_beyond_the_last_position() -> None:
    known = candidates(0.9, 0.05, room=0)
    found = allocate([Leaf(3, 0.5, 0)], known, [0.9, 0.05], budget=9, together=False)
    assert found.send == [(0, 0), (0, 1)]
    assert found.feed == []


def test_children_that_come_together_are_fed_only_if_all_fit() -> None:
    assert allocate([LEAF], [], [0.5, 0.4, 0.3], budget=2, together=True).feed == []
    assert allocate([LEAF], [], [0.5, 0.4, 0.3], budget=3, together=True).feed == [0]


def test_what_is_less_likely_than_what_was_refused_is_not_sent() -> None:
    found = allocate([], candidates(0.5, 0.1), [0.5, 0.1], budget=9, together=False, floor=0.2)
    assert found.send == [(0, 0)]


CHANCES = st.sampled_from([1.0, 0.75, 0.7, 0.5, 0.3, 0.25, 0.1])
"""Few, so that many are equal."""


@settings(deadline=None)
@given(
    chances=st.lists(st.tuples(CHANCES, st.integers(0, 4)), max_size=6),
    more=st.lists(st.tuples(CHANCES, st.integers(0, 4)), max_size=6),
    budget=st.integers(0, 20),
    together=st.booleans(),
)
def test_never_more_than_the_budget(
    chances: list[tuple[float, int]],
    more: list[tuple[float, int]],
    budget: int,
    together: bool,
) -> None:
    leaves, known = _leaves(chances), _known(more)
    found = allocate(leaves, known, [0.6, 0.3], budget=budget, together=together)
    assert len(found.send) + len(found.feed) * (2 if together else 1) <= budget
    assert len(set(found.feed)) == len(found.feed)


@settings(deadline=None, max_examples=300)
@given(
    chances=st.lists(st.tuples(CHANCES, st.integers(0, 4)), max_size=6),
    more=st.lists(st.tuples(CHANCES, st.integers(0, 4)), max_size=9),
    means=st.lists(CHANCES, min_size=1, max_size=4),
    budget=st.integers(0, 40),
    floor=st.sampled_from([0.0, 0.07, 0.25]),
)
def test_the_likeliest_of_all_are_taken_in_their_order(
    chances: list[tuple[float, int]],
    more: list[tuple[float, int]],
    means: list[float],
    budget: int,
    floor: float,
) -> None:
    leaves, known = _leaves(chances), _known(more)
    found = allocate(leaves, known, means, budget=budget, together=False, floor=floor)
    assert found == _one_after_the_other(leaves, known, means, budget, floor)


def _leaves(chances: Sequence[tuple[float, int]]) -> list[Leaf]:
    return [Leaf(node, chance, room) for node, (chance, room) in enumerate(chances)]


def _known(chances: Sequence[tuple[float, int]]) -> list[Known]:
    known = [(-chance, at, room, (9, at)) for at, (chance, room) in enumerate(chances)]
    return sorted(known)


def _one_after_the_other(
    leaves: Sequence[Leaf],
    known: Sequence[Known],
    means: Sequence[float],
    budget: int,
    floor: float,
) -> Allocation:
    """The same as it is defined: of all that may be next the likeliest, all children together."""
    heap: list[tuple[float, int, int, int | None, tuple[int, int] | None]] = []

    def push(chance: float, room: int, leaf: int | None, place: tuple[int, int] | None) -> None:
        if chance >= floor:
            heapq.heappush(heap, (-chance, next(order), room, leaf, place))

    def push_children(chance: float, room: int, leaf: int | None) -> None:
        for mean in means if room > 0 else ():
            push(chance * mean, room - 1, leaf, None)

    order = iter(range(10_000))
    for one in leaves:
        push_children(one.chance, one.room, one.node)
    for negative, _, room, place in sorted(known, key=lambda each: each[1]):
        push(-negative, room, None, place)
    feed: list[int] = []
    send: list[tuple[int, int]] = []
    for _ in range(budget):
        if not heap:
            break
        negative, _, room, leaf, candidate = heapq.heappop(heap)
        if candidate is not None:
            send.append(candidate)
        elif leaf is not None and leaf not in feed:
            feed.append(leaf)
        push_children(-negative, room, None)
    return Allocation(feed, send)


@pytest.mark.parametrize("prior", [coupled_prior, drawn_prior])
def test_chances_follow_what_is_seen(prior: Callable[[int, float], float]) -> None:
    chances = RankChances(prior)
    assert chances.mean(0) > chances.mean(1) > chances.mean(2)
    for _ in range(300):
        chances.observe(1, 0.2, accepted=True)
        chances.observe(0, 0.2, accepted=False)
    assert chances.estimate(1, 0.2) > 0.9 > 0.1 > chances.estimate(0, 0.2)
    assert chances.estimate(0, 3.0) > 0.3, "other gaps keep their own"
