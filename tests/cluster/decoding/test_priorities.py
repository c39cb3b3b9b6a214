"""Waiting sequences of a higher priority are let in first, and none waits forever."""

from __future__ import annotations

from dataclasses import replace

from cluster.decoding.events import Admitted
from cluster.decoding.scheduler import Scheduler
from cluster.decoding.waiting import MOST_PASSED
from tests.cluster.decoding.true_text import request
from tests.cluster.decoding.world import World


def order_of(
    *arrivals: tuple[int, int], later: dict[int, tuple[int, int]] | None = None
) -> list[int]:
    """The order in which sequences get their first token, one place at a time.

    `arrivals`: number and priority. `later`: what arrives once a number of requests have ended.
    """
    world = World(Scheduler(max_num_seqs=1))
    world.join_target(0)
    later = dict(later or {})

    def admit(number: int, priority: int) -> None:
        asked = request(number, (number % 40, 41, 42), policy="off", max_tokens=2)
        world.send(Admitted(world.now, replace(asked, priority=priority)))

    for one in arrivals:
        admit(*one)
    order: list[int] = []
    while len(order) < len(world.emitted):
        if len(order) in later:
            admit(*later.pop(len(order)))
        world.answer(0)
        order += [n for n, emitted in world.emitted.items() if emitted and n not in order]
    world.scheduler.check_integrity()
    return order


def test_a_higher_priority_goes_first_and_equal_ones_in_the_order_of_arrival() -> None:
    # The first has the place before the others come.
    assert order_of((1, 0), (2, 0), (3, 5), (4, 9), (5, 5), (6, 0)) == [1, 4, 3, 5, 2, 6]


def test_without_priorities_the_order_is_that_of_arrival() -> None:
    assert order_of(*((number, 0) for number in range(1, 8))) == [1, 2, 3, 4, 5, 6, 7]
    assert order_of(*((number, 7) for number in range(1, 8))) == [1, 2, 3, 4, 5, 6, 7]


def test_a_sequence_is_passed_a_bounded_number_of_times() -> None:
    """Urgent ones arrive forever; each of the others is next after MOST_PASSED of them."""
    urgent = [(number, 9) for number in range(10, 14)]
    later = {count: (100 + count, 9) for count in range(1, 40)}
    order = order_of((1, 9), (2, 0), (3, 0), *urgent, later=later)
    assert order.index(2) == MOST_PASSED + 1
    assert order.index(3) == 2 * (MOST_PASSED + 1)
