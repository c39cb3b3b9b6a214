"""Which driver gets a request: shared beginnings, loads and the bounds of what is remembered."""

from __future__ import annotations

import random

import pytest

from cluster.gateway.drivers import BLOCK_BYTES, SHARE, SLACK, Router
from paceline.chat import Message
from paceline.generation import GenerateInput


def _text(seed: int, length: int = 3 * BLOCK_BYTES) -> str:
    generator = random.Random(seed)
    return "".join(generator.choice("abcdefgh ") for _ in range(length))


def _chat(*contents: str) -> list[Message]:
    return [Message("user", content) for content in contents]


@pytest.mark.parametrize(
    "make", [_text, lambda seed: _chat(_text(seed)), lambda seed: [seed] * 500]
)
def test_requests_that_begin_alike_go_to_one_driver(make: object) -> None:
    assert callable(make)
    drivers, router = {str(number): 0 for number in range(4)}, Router()
    first = [router.choose(drivers, make(seed), "") for seed in range(8)]
    # Equal loads: each driver in turn.
    assert first == ["0", "1", "2", "3"] * 2
    for seed in random.Random(1).sample(range(8), 8):
        assert router.choose(drivers, make(seed), "") == first[seed]


def test_the_longest_shared_beginning_decides() -> None:
    one, other = drivers = {"one": 0, "other": 0}
    router = Router()
    system = _text(1)
    assert router.choose(drivers, system + _text(2), "") == one
    drivers[one] = 20  # Too busy, so the same beginning goes on elsewhere.
    assert router.choose(drivers, system + _text(3), "") == other
    drivers[one] = 0
    assert router.choose(drivers, system + _text(2) + "more", "") == one
    assert router.choose(drivers, system + _text(3) + "more", "") == other


def test_the_next_turn_of_a_chat_goes_where_the_last_one_went() -> None:
    drivers, router = {"one": 0, "other": 0}, Router()
    router.choose(drivers, _chat(_text(7)), "")
    turn = _chat(_text(1))
    chosen = router.choose(drivers, turn, "")
    for number in range(2, 5):
        turn += [Message("assistant", _text(number)), Message("user", "And then?")]
        assert router.choose(drivers, turn, "") == chosen


@pytest.mark.parametrize("given", ["short", _chat("short"), [5, 6]])
def test_a_short_prompt_goes_to_the_least_busy(given: GenerateInput) -> None:
    one, other = drivers = {"one": 0, "other": 0}
    router = Router()
    chosen = router.choose(drivers, given, "")
    drivers[chosen] = 1
    assert router.choose(drivers, given, "") == (other if chosen == one else one)


def test_the_load_stays_bounded_if_all_begin_alike() -> None:
    drivers, router = {str(number): 0 for number in range(3)}, Router()
    system = _text(1)
    for number in range(300):
        drivers[router.choose(drivers, system + _text(number + 10), "")] += 1
        loads = drivers.values()
        assert max(loads) <= SLACK + SHARE * min(loads) + 1, loads
    # The control: without the rule one driver has them all.


def test_tenants_do_not_see_each_others_beginnings() -> None:
    drivers, router = {"one": 0, "other": 0}, Router()
    first = router.choose(drivers, _text(1), "a")
    assert router.choose(drivers, _text(1), "b") != first
    assert router.choose(drivers, _text(1), "a") == first


def test_a_driver_that_is_gone_is_not_chosen() -> None:
    one, other = drivers = {"one": 0, "other": 0}
    router = Router()
    assert router.choose(drivers, _text(1), "") == one
    assert router.choose({other: 0, "third": 0}, _text(1), "") == other


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.gateway.drivers.MAX_BEGINNINGS", 10)
    monkeypatch.setattr("cluster.gateway.drivers.MAX_TENANTS", 4)
    drivers, router = {"one": 0, "other": 0}, Router()
    for number in range(50):
        router.choose(drivers, _text(number, 4_000_000 if number == 7 else 2000), str(number % 9))
    assert len(router._tenants) == 4
    assert max(map(len, router._tenants.values())) <= 10
