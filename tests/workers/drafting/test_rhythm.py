"""A pass is held back if the next outcome will likely make it useless."""

from __future__ import annotations

import pytest

from paceline.sampling import SamplingParams, SequenceSpec
from workers.drafting.desk import DraftingDesk, DraftingSession, Rhythm
from workers.drafting.tree import Grant
from workers.emulated.latency_profiles import load_profile
from workers.emulated.replay_proposer import ReplayProposer
from workers.emulated.replay_text import Guess, ReplayText

SPEC = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=2, rule="coupled")
STEP, PASS = 0.02, 0.0025
FREE = Grant(until_position=100, drafting_is_free=True)


class _NoTime:
    """A clock for passes that take no time."""

    def now(self) -> float:
        return 0.0

    def finish(self, begin: float, seconds: float) -> float:
        return begin + seconds


def _desk(acceptance: float) -> DraftingDesk:
    text = ReplayText(500)
    profile = load_profile("1b-h100")
    guess = Guess(acceptance, 0.85, 1)
    return DraftingDesk(ReplayProposer(1000, profile, text, guess, _NoTime()), max_sequences=4)


def _opened(desk: DraftingDesk, grant: Grant = FREE) -> DraftingSession:
    session = desk.open_session()
    assert session.open(1, SPEC, [50, 51]) is None
    session.grant(1, grant)
    return session


def _beat(session: DraftingSession, now: float) -> None:
    """An outcome that refuses whatever was drafted."""
    session.outcome(1, session.trees[1].num_committed, [7])
    session.handled(now)


def _after_beats(desk: DraftingDesk, session: DraftingSession, depth: int) -> float:
    """Give outcomes in a beat, then draft `depth` tokens. Returns the time of the last outcome."""
    now = 0.0
    for _ in range(6):
        now += STEP
        _beat(session, now)
    for _ in range(depth):
        desk.run_pass()
        desk.pass_took(1000 * PASS)
    return now


def test_the_next_outcome_is_expected_a_beat_after_the_last() -> None:
    rhythm = Rhythm()
    assert rhythm.share_after(0.0, PASS) == 0.0
    for step in range(5):
        rhythm.beat(step * STEP)
    rhythm.beat(3.0)  # a long pause is no beat
    expected = 3.0 + STEP
    assert rhythm.share_after(3.0, PASS) == 0.0
    assert rhythm.share_after(expected - PASS, PASS) == pytest.approx(0.0)
    assert rhythm.share_after(expected - 0.4 * PASS, PASS) == pytest.approx(0.6)
    assert rhythm.share_after(expected, PASS) == 1.0
    give_up_at = rhythm.give_up_at(PASS)
    assert expected < give_up_at < expected + PASS
    assert rhythm.share_after(give_up_at, PASS) == 0.0  # it is overdue


def test_a_pass_that_would_be_useless_is_held_back() -> None:
    """If drafts are never right, a pass is held back as soon as it would meet the outcome."""
    desk = _desk(0.0)
    session = _opened(desk)
    expected = _after_beats(desk, session, depth=6) + STEP
    assert desk.hold_until(expected - 1.1 * PASS) is None
    until = desk.hold_until(expected - 0.7 * PASS)
    assert until is not None
    assert expected < until < expected + PASS
    assert desk.hold_until(until) is None  # it is not held back for ever
    _beat(session, expected)
    assert desk.hold_until(expected + 0.0001) is None


def test_a_pass_longer_than_a_beat_is_not_held_back_for_ever() -> None:
    """An outcome comes meanwhile in any case. Never begun, it would be believed slow for ever."""
    desk = _desk(0.0)
    session = _opened(desk)
    now = _after_beats(desk, session, depth=0)
    desk.run_pass()
    desk.pass_took(5000 * STEP)
    _beat(session, now + STEP)
    until = desk.hold_until(now + 1.5 * STEP)
    assert until is not None, "negative control: it is held back for the next outcome"
    for beat in range(2, 6):
        _beat(session, now + beat * STEP)
    assert now + 3 * STEP < until < now + 5 * STEP
    assert desk.hold_until(now + 5.5 * STEP) is None


def test_it_is_not_held_back_where_it_is_likelier_of_use_than_in_the_way() -> None:
    """The first token after an outcome is right with a prior chance of about 0.7.

    The next one has half of that chance, and so on. So the decision depends on the share of the
    pass after the outcome.
    """
    desk = _desk(0.0)
    session = _opened(desk)
    expected = _after_beats(desk, session, depth=1) + STEP
    promise = desk.proposer.promise(session.trees[1])
    assert 0.2 < promise < 0.8
    assert desk.hold_until(expected - (1 - promise + 0.05) * PASS) is None
    assert desk.hold_until(expected - (1 - promise - 0.05) * PASS) is not None


def test_branches_make_a_pass_likelier_of_use() -> None:
    desk, other = _desk(0.85), _desk(0.85)
    chain = _opened(desk)
    fans = _opened(other, Grant(until_position=100, nodes=60, fan_out=8, drafting_is_free=True))
    for one, session in ((desk, chain), (other, fans)):
        _after_beats(one, session, depth=6)
    assert other.proposer.promise(fans.trees[1]) > desk.proposer.promise(chain.trees[1])


def test_who_is_waited_for_or_has_no_beat_holds_nothing_back() -> None:
    desk = _desk(0.0)
    session = _opened(desk)
    moment = _after_beats(desk, session, depth=6) + STEP - 0.1 * PASS
    assert desk.hold_until(moment) is not None
    session.grant(1, Grant(until_position=100))  # the target waits for this drafter
    assert desk.hold_until(moment) is None
    session.grant(1, FREE)
    assert desk.hold_until(moment) is not None
    _opened(desk)  # another driver, with a beat of its own
    assert desk.hold_until(moment) is None
