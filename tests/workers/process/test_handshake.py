"""Which drivers a worker lets in, which workers a driver uses, and what they are told if not."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import ExitStack

import pytest

from paceline.errors import PacelineError, ProtocolError, VersionMismatchError, WrongLifeError
from paceline.v1 import drafting_pb2, types_pb2
from workers.process import handshake
from workers.process.handshake import (
    MAX_NAME,
    MAX_REMEMBERED,
    DriverIdentity,
    Reception,
    check_version,
    split_life,
    with_life,
)
from workers.process.logs import SELDOM_LINES

PEER = "ipv4:10.0.0.1:5"


def reception(version: str = "0.5.2") -> Reception:
    return Reception("drafter", version=version)


def identity(life: int = 7, *, name: str = "one", version: str = "0.5.0") -> DriverIdentity:
    return DriverIdentity(name, life, version=version)


def not_replaced(error: PacelineError) -> None:
    pytest.fail(str(error))


def enter(at: Reception, hello: types_pb2.Hello, stack: ExitStack) -> list[str]:
    """Let a stream in until the stack ends. Returns where the reasons to end it appear."""
    ended: list[str] = []
    stack.enter_context(at.entered(hello, lambda error: ended.append(str(error)), PEER))
    return ended


@pytest.mark.parametrize("theirs", ["0.4.0", "0.5.0", "0.5.9+local", "0.6.0rc1", "0.6"])
def test_one_minor_version_apart_works(theirs: str) -> None:
    check_version(theirs, "0.5.2", they="driver 'one'", we="the drafter")
    check_version("0.5.2", theirs, they="driver 'one'", we="the drafter")


@pytest.mark.parametrize("theirs", ["0.3.9", "0.7.0", "1.5.2", "10.5.2", "0.50.2"])
def test_more_is_refused_with_both_versions_and_what_to_do(theirs: str) -> None:
    with pytest.raises(VersionMismatchError) as caught:
        check_version(theirs, "0.5.2", they="driver 'one'", we="the drafter 'two'")
    assert str(caught.value).startswith(
        f"driver 'one' runs Paceline {theirs}, and the drafter 'two' runs 0.5.2: versions may "
    )
    assert "upgrade the older one" in str(caught.value)


@pytest.mark.parametrize(
    "theirs",
    [
        "x",
        "5",
        "0.",
        ".5",
        "0.05.1",
        "\u0660.\u0665.\u0661",
        "0,5",
        "0.5" + "0" * 99,
        "0.5.0\n" * 30,
    ],
)
def test_a_version_that_is_none_is_refused_and_not_quoted_at_length(theirs: str) -> None:
    with pytest.raises(VersionMismatchError, match="which is none such as") as caught:
        check_version(theirs, "0.5.2", they="driver 'one'", we="the drafter")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_a_build_that_tells_no_version_is_refused_as_such() -> None:
    with pytest.raises(VersionMismatchError, match="'one' tells no version, as builds do that"):
        check_version("", "0.5.2", they="driver 'one'", we="the drafter")


def test_an_address_may_tell_a_life() -> None:
    for life in (None, 1, (1 << 64) - 1):
        assert split_life(with_life("[::1]:50051", life)) == ("[::1]:50051", life)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"driver": ""}, r"hello.driver: expected 1 to 128 characters, got 0"),
        ({"driver": "x" * (MAX_NAME + 1)}, r"hello.driver: .* got 129"),
        ({"worker": ""}, r"hello.worker: expected 1 to 128 characters, got 0"),
        ({"driver_life": 0}, r"hello.driver_life: expected a number above 0"),
        ({"stream": 0}, r"hello.stream: expected a number above 0"),
        ({"worker_life": 0}, r"hello.worker_life: expected a number above 0"),
    ],
)
def test_a_hello_without_a_field_is_refused(change: dict[str, object], message: str) -> None:
    at = reception()
    hello = identity().hello("drafter-0", at.life)
    for field, value in change.items():
        setattr(hello, field, value)
    with pytest.raises(ProtocolError, match=message), at.entered(hello, not_replaced, PEER):
        pass


def test_another_life_of_the_worker_is_refused_with_both_lives() -> None:
    before, at = reception(), reception()
    with pytest.raises(WrongLifeError) as caught:
        at.check(identity().hello("drafter-0", before.life, stream=False), PEER)
    told = str(caught.value)
    assert f"means the life {before.life:x} of 'drafter-0'" in told
    assert f"this drafter has the life {at.life:x}" in told
    at.check(identity().hello("drafter-0", None, stream=False), PEER)  # It asks for the life.


def test_a_later_life_of_a_driver_ends_the_earlier_ones_streams_and_nobody_elses() -> None:
    at, old, other = reception(), identity(7), identity(9, name="other")
    with ExitStack() as stack:
        old_streams = [enter(at, old.hello(name, at.life), stack) for name in ("a", "b")]
        others = enter(at, other.hello("a", at.life), stack)
        new = enter(at, identity(8).hello("a", at.life), stack)
        assert old_streams == 2 * [["the life 8 of driver 'one' has replaced 7"]]
        assert others == new == []
        # The earlier life may not come back, nor ask.
        for stream in (True, False):
            with pytest.raises(WrongLifeError, match="the life 7 of driver 'one' is over: its"):
                at.check(old.hello("c", at.life, stream=stream), PEER)
        with pytest.raises(WrongLifeError, match="is over"):
            enter(at, old.hello("c", at.life), stack)
    assert others == new == []


def test_a_later_stream_replaces_the_earlier_one_to_the_same_name_only() -> None:
    at, one = reception(), identity()
    with ExitStack() as stack:
        late = one.hello("a", at.life)
        first = enter(at, one.hello("a", at.life), stack)
        beside = enter(at, one.hello("b", at.life), stack)
        second = enter(at, one.hello("a", at.life), stack)
        assert first == ["the stream 4 of driver 'one' has replaced this one"]
        assert beside == second == []
        with pytest.raises(WrongLifeError, match="the stream 1 of driver 'one' comes late: its"):
            enter(at, late, stack)
        assert beside == second == []
    # What has ended is remembered too.
    with pytest.raises(WrongLifeError, match="comes late"), at.entered(late, not_replaced, PEER):
        pass


async def test_a_stream_that_says_something_else_first_is_refused() -> None:
    async def first() -> tuple[str, types_pb2.Hello | None]:
        return "a grant", None

    with pytest.raises(ProtocolError, match="first message of a stream to a drafter, got a grant"):
        await reception().hear(first(), PEER)


async def test_a_stream_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> tuple[str, types_pb2.Hello | None]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(handshake, "HELLO_SECONDS", 0.05)
    with pytest.raises(ProtocolError, match=r"and got none in 0\.05 s"):
        await reception().hear(never(), PEER)


def test_a_driver_uses_no_worker_of_another_life_or_version() -> None:
    driver = identity(version="0.5.0")
    right = drafting_pb2.DescribeDrafterResponse(version="0.6.1", life=11)
    driver.check(right, "drafter-0", None)
    driver.check(right, "drafter-0", 11)
    with pytest.raises(WrongLifeError, match="drafter-0 has the life b, but c is meant: another"):
        driver.check(right, "drafter-0", 12)
    with pytest.raises(ProtocolError, match="drafter-0 tells no life"):
        driver.check(drafting_pb2.DescribeDrafterResponse(version="0.5.0"), "drafter-0", None)
    with pytest.raises(VersionMismatchError, match="drafter-0 tells no version"):
        driver.check(drafting_pb2.DescribeDrafterResponse(life=11), "drafter-0", None)
    far = drafting_pb2.DescribeDrafterResponse(version="0.7.0", life=11)
    with pytest.raises(VersionMismatchError, match=r"drafter-0 runs Paceline 0.7.0, and the driv"):
        driver.check(far, "drafter-0", None)


def test_refusals_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    at = reception()
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            with pytest.raises(ProtocolError):
                at.check(types_pb2.Hello(), PEER)
    assert len(caplog.messages) == SELDOM_LINES
    assert caplog.messages[0].startswith(f"refused {PEER}: hello.driver: expected 1 to")


def test_what_a_worker_remembers_is_bounded_and_open_streams_are_never_forgotten() -> None:
    at, held = reception(), identity(7, name="held")
    with ExitStack() as stack:
        ended = enter(at, held.hello("a", at.life), stack)
        for number in range(2 * MAX_REMEMBERED):
            hello = identity(name=f"driver {number}").hello("a", at.life)
            with at.entered(hello, not_replaced, PEER):
                pass
        assert len(at._lives) <= MAX_REMEMBERED
        assert len(at._last) <= MAX_REMEMBERED
        enter(at, identity(8, name="held").hello("a", at.life), stack)
        assert ended == ["the life 8 of driver 'held' has replaced 7"]


def test_any_hellos_end_only_streams_that_a_later_one_of_the_same_driver_replaces() -> None:
    """20,000 random hellos, many of them broken, against a model of a few lines."""
    rng = random.Random(18)
    at = reception()
    open_streams: dict[tuple[str, str], tuple[int, int, list[str], ExitStack]] = {}
    last: dict[tuple[str, str], tuple[int, int]] = {}
    lives: dict[str, int] = {}
    admitted = refused = 0
    for turn_number in range(20_000):
        hello = types_pb2.Hello(
            driver=rng.choice(["one", "two", "three", "", "x" * 200, "\x00\u202e"]),
            driver_life=1 + turn_number // 500 - rng.choice([0, 0, 0, 1]),
            stream=rng.choice([0, 1 + turn_number, turn_number // 2]),
            worker=rng.choice(["a", "b", ""]),
            worker_life=rng.choice([at.life, at.life, at.life, 0, 5]),
            version=rng.choice(["0.5.0", "0.4.1", "0.6.0", "0.5.0", "0.7.0", "", "\n"]),
        )
        key, turn = (hello.driver, hello.worker), (hello.driver_life, hello.stream)
        is_whole = (
            hello.driver in ("one", "two", "three", "\x00\u202e")
            and hello.worker
            and hello.driver_life
            and hello.stream
            and hello.worker_life == at.life
            and hello.version in ("0.5.0", "0.4.1", "0.6.0")
        )
        fits = is_whole and hello.driver_life >= lives.get(hello.driver, 0)
        expected = bool(fits and turn > last.get(key, (0, 0)))
        stack = ExitStack()
        try:
            ended = enter(at, hello, stack)
        except PacelineError as error:
            told = str(error)
            refused += 1
            if expected or len(told) > 700:
                pytest.fail(told)
        else:
            assert expected
            admitted += 1
            replaced = {
                one
                for one in open_streams
                if one == key
                or (one[0] == hello.driver and open_streams[one][0] < hello.driver_life)
            }
            for one in replaced:
                assert len(open_streams.pop(one)[2]) == 1
            open_streams[key] = (*turn, ended, stack)
            last[key], lives[hello.driver] = turn, hello.driver_life
        assert all(not told for _, _, told, _ in open_streams.values())
        if open_streams and rng.random() < 0.3:
            open_streams.pop(rng.choice(list(open_streams)))[3].close()
    assert admitted > 50
    assert refused > 1000
