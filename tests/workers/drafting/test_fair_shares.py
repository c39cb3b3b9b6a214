"""Several drivers share one drafter: time, places and memory. Times are virtual and exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from paceline.sampling import SamplingParams, SequenceSpec
from workers.drafting.desk import DraftingDesk, DraftingSession
from workers.drafting.fair_shares import CREDIT_MS, EFFICIENCY, RIDE, PassCost, Shares
from workers.drafting.tree import Grant
from workers.emulated.latency_profiles import DeviceProfile, PassTimes
from workers.emulated.replay_proposer import ReplayProposer
from workers.emulated.replay_text import Guess, ReplayText

SPEC = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=2, rule="coupled")
SECONDS = 3.0
WINDOW = 4
"""Tokens that a driver verifies in a step."""


class _Clock:
    """Virtual time that passes advance."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def finish(self, begin: float, seconds: float) -> float:
        self.time = begin + seconds
        return self.time


def _device(a_pass: float, a_token: float) -> DeviceProfile:
    """A device whose passes take `a_pass` + `a_token` for each token, in milliseconds."""
    tokens = (1, 4096)
    row = tuple(a_pass + a_token * count for count in tokens)
    return DeviceProfile(
        name="linear",
        role="drafter",
        about="made up",
        gpus=1,
        hosts=1,
        source="made up for this test",
        pass_ms=PassTimes(batch=(1, 4096), tokens=tokens, table=(row, row)),
    )


CPU, GPU = _device(4.0, 2.0), _device(4.0, 0.02)


@dataclass(eq=False)
class _Driver:
    """Asks for WINDOW tokens at a time, and commits them `step` seconds after they came."""

    session: DraftingSession
    step: float
    sequences: range
    before: int = 0
    _due: dict[int, float] = field(default_factory=dict)

    @property
    def drafted(self) -> int:
        """Tokens that the drafter was fed for it."""
        return self.session.share.tokens - self.before

    def begin(self) -> None:
        for one in self.sequences:
            assert self.session.open(one, SPEC, [one + 50, 51]) is None
            self._ask(one)

    def _ask(self, one: int) -> None:
        committed = self.session.trees[one].num_committed
        self.session.grant(one, Grant(until_position=committed + WINDOW))

    def look(self, now: float) -> None:
        """Commit what is verified by now."""
        for one, tree in list(self.session.trees.items()):
            if one not in self._due and tree.num_nodes == WINDOW:
                self._due[one] = now + self.step
            if self._due.get(one, now + 1) <= now:
                del self._due[one]
                self.session.outcome(one, tree.num_committed, list(tree.tokens[1:]))
                self._ask(one)

    @property
    def next_at(self) -> float:
        return min(self._due.values(), default=float("inf"))


def _run(device: DeviceProfile, make: Callable[[DraftingDesk], list[_Driver]]) -> list[_Driver]:
    """Run drivers for SECONDS of virtual time; count what they got after the first third."""
    clock = _Clock()
    text = ReplayText(500)
    desk = DraftingDesk(
        ReplayProposer(100_000, device, text, Guess(1.0, 1.0, 1), clock), max_sequences=256
    )
    drivers = make(desk)
    for driver in drivers:
        driver.begin()
    warm = False
    while clock.time < SECONDS:
        if not warm and clock.time > SECONDS / 3:
            warm = True
            for driver in drivers:
                driver.before = driver.drafted
        if desk.has_work:
            began = clock.time
            desk.run_pass()
            desk.pass_took(1000 * (clock.time - began))
        else:
            clock.time = min(driver.next_at for driver in drivers)
        for driver in drivers:
            driver.look(clock.time)
    desk.check_integrity()
    for driver in drivers:
        desk.close_session(driver.session)
    assert desk.num_open == 0
    assert not desk.shares.all
    return drivers


def _one(desk: DraftingDesk, step: float = 0.0) -> _Driver:
    """A driver with one request."""
    return _Driver(desk.open_session(), step, range(1))


def _flood(desk: DraftingDesk) -> _Driver:
    """A driver with 64 requests that wants as many tokens as it can get."""
    return _Driver(desk.open_session(), 0.0, range(64))


def _alone(device: DeviceProfile, step: float) -> float:
    return _run(device, lambda desk: [_one(desk, step)])[0].drafted


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_flood_leaves_a_small_driver_half_of_the_time(device: DeviceProfile) -> None:
    """A driver that could use all of the drafter gets 90 % of its half at least."""
    half = _alone(device, 0.0) / 2
    small, _ = _run(device, lambda desk: [_one(desk), _flood(desk)])
    assert small.drafted >= 0.9 * half


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_driver_that_needs_less_than_its_share_hardly_notices_a_flood(
    device: DeviceProfile,
) -> None:
    """Its target takes 100 ms to verify what the drafter needs some 20 ms for."""
    alone = _alone(device, 0.1)
    small, _ = _run(device, lambda desk: [_one(desk, 0.1), _flood(desk)])
    assert small.drafted >= 0.9 * alone


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_flood_gets_what_the_others_leave(device: DeviceProfile) -> None:
    """Its passes are shorter (EFFICIENCY), and nothing else of its time is lost."""
    (flood,) = _run(device, lambda desk: [_flood(desk)])
    small, beside = _run(device, lambda desk: [_one(desk, 0.1), _flood(desk)])
    busy = small.drafted * device.pass_ms.ms(1, 1) / 1000 / (SECONDS * 2 / 3)
    assert beside.drafted >= 0.9 * EFFICIENCY * (1 - busy) * flood.drafted


def test_equal_drivers_get_equal_parts() -> None:
    drivers = _run(CPU, lambda desk: [_flood(desk) for _ in range(3)])
    counts = [one.session.share.tokens for one in drivers]
    assert max(counts) <= min(counts) + 2 * 64  # two passes
    assert min(counts) > 4 * 64


def test_streams_of_one_party_have_one_share() -> None:
    """A driver gains nothing by opening many streams, if it gives its name."""

    def make(desk: DraftingDesk) -> list[_Driver]:
        many = [_Driver(desk.open_session("many"), 0.0, range(8)) for _ in range(8)]
        return [_Driver(desk.open_session("few"), 0.0, range(8)), *many]

    few, *rest = _run(CPU, make)
    spent = {one.session.share: one.session.share.milliseconds for one in (few, *rest)}
    assert len(spent) == 2
    assert min(spent.values()) >= 0.9 * max(spent.values())
    assert few.drafted >= 0.7 * rest[0].drafted  # smaller passes cost more a token


def test_without_turns_the_flood_takes_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if every pass drafts for all, the same measure fails."""
    half = _alone(CPU, 0.0) / 2
    monkeypatch.setattr(Shares, "contended", False)
    monkeypatch.setattr(
        Shares, "choose", lambda _, ready: [tree for trees in ready.values() for tree in trees]
    )
    small, _ = _run(CPU, lambda desk: [_one(desk), _flood(desk)])
    assert small.drafted < 0.2 * half


def test_the_price_of_a_token_is_learned_from_passes_of_different_sizes() -> None:
    cost = PassCost()
    for _ in range(5):
        cost.note(8, 20.0)
    assert cost.per_token is None  # passes of one size show no price
    assert cost.worthwhile(64) == 64
    for tokens in (1, 64, 16, 32, 8, 4) * 3:
        cost.note(tokens, 4.0 + 2.0 * tokens)
    assert cost.per_token == pytest.approx(2.0, rel=0.01)
    assert cost.ms(1) == pytest.approx(6.0, rel=0.1)
    least = cost.worthwhile(64)
    rate = [count / (4.0 + 2.0 * count) for count in (least, least - 1, 64)]
    assert rate[0] >= EFFICIENCY * rate[2] * 0.99
    assert rate[1] < EFFICIENCY * rate[2]
    assert RIDE < 1


def _desk(max_sequences: int) -> DraftingDesk:
    text = ReplayText(500)
    return DraftingDesk(
        ReplayProposer(100_000, GPU, text, Guess(1.0, 1.0, 1), _Clock()),
        max_sequences=max_sequences,
    )


def test_places_are_lent_and_given_back() -> None:
    desk = _desk(max_sequences=8)
    flood, small = desk.open_session(), desk.open_session()
    for one in range(8):
        assert flood.open(one, SPEC, [50, 51]) is None
    refused = flood.open(8, SPEC, [50, 51])
    assert refused is not None
    assert "8 sequences are open" in refused.reason
    assert not desk.taken_back()
    for one in range(4):
        assert small.open(one, SPEC, [50, 51]) is None
    taken = desk.taken_back()
    assert [session for session, _ in taken] == [flood] * 4
    assert [declined.sequence_id for _, declined in taken] == [7, 6, 5, 4]  # the newest first
    assert not any(declined.for_good for _, declined in taken)
    # Both have half now, and neither can take from the other.
    assert small.open(4, SPEC, [50, 51]) is not None
    assert flood.open(9, SPEC, [50, 51]) is not None
    desk.check_integrity()
    desk.close_session(flood)
    assert desk.num_open == 4
    for one in range(4, 8):
        assert small.open(one, SPEC, [50, 51]) is None
    desk.check_integrity()


def test_credit_of_many_shares_does_not_add_up() -> None:
    """Idle shares wake one after the other. A busy one waits for the credit of each, not more."""
    shares = Shares()
    busy, *idle = [shares.join(str(number)) for number in range(17)]
    for _ in range(200):
        shares.begin([busy]).spent += 5.0
    passes, longest = 0, 0
    for one in [*idle, *[None] * 600]:
        waiting = [busy, *idle] if one is None else [busy, *idle[: idle.index(one) + 1]]
        owner = shares.begin(waiting)
        owner.spent += 5.0
        passes = 0 if owner is busy else passes + 1
        longest = max(longest, passes)
    assert longest * 5.0 <= 16 * (CREDIT_MS + 5.0) + 5.0


def test_drivers_without_a_party_have_tenants_of_their_own() -> None:
    desk = _desk(max_sequences=8)
    sessions = [
        desk.open_session(driver="a"),
        desk.open_session(driver="a"),
        desk.open_session(driver="b"),
        desk.open_session("a"),
    ]
    for session in sessions:
        assert session.open(1, SPEC, [50, 51], tenant="x") is None
    first, again, other, party = (session.trees[1].tenant for session in sessions)
    assert first == again
    assert len({first, other, party}) == 3
