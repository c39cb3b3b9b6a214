"""Nodes are spent best first, and never more than there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.drafting.allocation import Place, allocate
from workers.drafting.chances import RankChances, coupled_prior, drawn_prior

LEAF = Place(0, 0, 1.0, 8, known=False)


def candidate(index: int, chance: float, room: int = 5) -> Place:
    return Place(0, index, chance, room, known=True)


def test_a_sure_first_child_makes_a_chain() -> None:
    found = allocate([candidate(0, 0.9), candidate(1, 0.05)], [0.9, 0.05], budget=4, together=False)
    assert found.send == [(0, 0)]


def test_doubtful_first_children_make_the_tree_wide() -> None:
    found = allocate([candidate(0, 0.4), candidate(1, 0.35)], [0.5, 0.2], budget=3, together=False)
    assert found.send == [(0, 0), (0, 1)]


def test_nothing_grows_beyond_the_last_position() -> None:
    places = [candidate(0, 0.9, room=0), candidate(1, 0.05, room=0), Place(3, 0, 0.5, 0, False)]
    found = allocate(places, [0.9, 0.05], budget=9, together=False)
    assert found.send == [(0, 0), (0, 1)]
    assert found.feed == []


def test_children_that_come_together_are_fed_only_if_all_fit() -> None:
    assert allocate([LEAF], [0.5, 0.4, 0.3], budget=2, together=True).feed == []
    assert allocate([LEAF], [0.5, 0.4, 0.3], budget=3, together=True).feed == [0]


def test_what_is_less_likely_than_what_was_refused_is_not_sent() -> None:
    found = allocate(
        [candidate(0, 0.5), candidate(1, 0.1)], [0.5, 0.1], budget=9, together=False, floor=0.2
    )
    assert found.send == [(0, 0)]


@settings(deadline=None)
@given(
    chances=st.lists(st.floats(0.001, 1.0), max_size=6),
    budget=st.integers(0, 20),
    together=st.booleans(),
)
def test_never_more_than_the_budget(chances: list[float], budget: int, together: bool) -> None:
    places = [
        candidate(index, chance) if index % 2 else Place(index, 0, chance, 3, known=False)
        for index, chance in enumerate(chances)
    ]
    found = allocate(places, [0.6, 0.3], budget=budget, together=together)
    assert len(found.send) + len(found.feed) * (2 if together else 1) <= budget
    assert len(set(found.feed)) == len(found.feed)


@pytest.mark.parametrize("prior", [coupled_prior, drawn_prior])
def test_chances_follow_what_is_seen(prior: Callable[[int, float], float]) -> None:
    chances = RankChances(prior)
    assert chances.mean(0) > chances.mean(1) > chances.mean(2)
    for _ in range(300):
        chances.observe(1, 0.2, accepted=True)
        chances.observe(0, 0.2, accepted=False)
    assert chances.estimate(1, 0.2) > 0.9 > 0.1 > chances.estimate(0, 0.2)
    assert chances.estimate(0, 3.0) > 0.3, "other gaps keep their own"
