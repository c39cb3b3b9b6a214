"""Estimates of how long things take: from what was seen, and for what was not."""

from __future__ import annotations

import pytest

from cluster.decoding.events import (
    Admitted,
    DrafterJoined,
    Event,
    SequenceVerdict,
    StepDone,
    TargetJoined,
)
from cluster.decoding.instructions import RunStep, SendGrant
from cluster.decoding.scheduler import Scheduler
from cluster.decoding.timings import (
    MOST_READ,
    DriverShare,
    StepCosts,
)
from tests.cluster.decoding.scripts import PROMPT
from tests.cluster.decoding.true_text import request


def test_what_a_candidate_adds_to_a_step_and_how_many_tokens_come() -> None:
    costs = StepCosts()
    for step in range(20):
        candidates = step % 4
        seconds = 0.010 + 0.002 * candidates
        costs.add(0.02 * step, candidates=candidates, step_seconds=seconds, tokens=3)
    assert costs.ms_per_candidate == pytest.approx(2.0)
    assert costs.tokens_per_ms == pytest.approx(3 / 20)
    # What the target did not work is no time of a step.
    costs.pause()
    costs.add(99.0, candidates=0, step_seconds=0.010, tokens=1)
    assert costs.tokens_per_ms == pytest.approx(3 / 20)


def test_the_work_of_chains_is_what_all_chains_share() -> None:
    share = DriverShare()
    for second in range(50):
        share.answered(second, driver_seconds=0.5, step_seconds=0.9, chains=40)
    assert share.most_chains == pytest.approx(40 * 0.85 / 0.5)
    for second in range(50, 100):
        share.answered(second, driver_seconds=1.0, step_seconds=0.9, chains=40)
    assert share.most_chains == pytest.approx(40 * 0.85, rel=1e-3)


def test_time_in_which_nothing_was_asked_is_no_time_for_chains() -> None:
    share = DriverShare()
    for minute in range(50):
        share.answered(60.0 * minute, driver_seconds=0.5, step_seconds=0.9, chains=40)
    assert share.most_chains == pytest.approx(40 * 0.85 * (0.9 + 0.5) / 0.5)
    assert share.most_chains < MOST_READ


def test_where_work_is_not_known_the_bound_stays() -> None:
    share = DriverShare()
    for second in range(50):
        share.answered(second, driver_seconds=0.0, step_seconds=0.9, chains=40)
    assert share.most_chains == MOST_READ


def test_steps_without_chains_say_nothing_of_chains() -> None:
    share = DriverShare()
    for second in range(5000):
        chains = 40 if second < 50 else 0
        share.answered(second, driver_seconds=0.5, step_seconds=0.9, chains=chains)
    assert share.most_chains == pytest.approx(40 * 0.85 / 0.5)


class _Run:
    """A scheduler whose target refuses every candidate, in steps of 20 ms."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.granted: dict[int, int] = {}
        """By sequence: the branches that its last grant allowed."""
        self._steps: list[RunStep] = []

    def send(self, event: Event) -> None:
        out = self.scheduler.handle(event)
        self._steps.extend(one for one in out if isinstance(one, RunStep))
        grants = [one for one in out if isinstance(one, SendGrant)]
        self.granted.update({one.sequence_id: one.grant.fan_out for one in grants})

    def answer(self, *, driver_seconds: float) -> None:
        """Answer the last step."""
        step = self._steps[-1]
        verdicts = tuple(SequenceVerdict(one.sequence_id, 0, 9) for one in step.slices)
        now = 0.02 * len(self._steps)
        self.send(
            StepDone(now, step.step, verdicts, step_seconds=0.018, driver_seconds=driver_seconds)
        )


def test_branches_are_granted_after_long_plain_decoding() -> None:
    run = _Run()
    run.send(DrafterJoined(0, "a", 10_000))
    run.send(Admitted(0, request(1, PROMPT, policy="chain", max_tokens=10)))
    run.send(Admitted(0, request(2, PROMPT, policy="off", max_tokens=5000)))
    run.send(TargetJoined(0, 50, 10_000, 4, 4096))
    for _ in range(3000):
        run.answer(driver_seconds=1e-4)
    run.send(Admitted(60, request(3, PROMPT, policy="fanout", window=8)))
    run.answer(driver_seconds=1e-4)
    assert run.granted[3] == 17


def _branches_granted(driver_share: float, *, steps: int = 80) -> list[int]:
    """By step: the branches that the last grant allowed, for four sequences at two drafters."""
    run = _Run()
    for name in "ab":
        run.send(DrafterJoined(0, name, 1000))
    for number in range(1, 5):
        asked = request(number, PROMPT, policy="fanout", window=8, max_tokens=200)
        run.send(Admitted(0, asked))
    run.send(TargetJoined(0, 50, 1000, 4, 1024))
    seen = []
    for _ in range(steps):
        run.answer(driver_seconds=0.02 * driver_share)
        seen.append(max(run.granted.values()))
    run.scheduler.check_integrity()
    return seen


def test_a_driver_without_time_has_its_drafters_draft_less() -> None:
    assert set(_branches_granted(0.3)) == {17}, "as many as the grant has places for"
    busy = _branches_granted(1.0)
    assert busy[0] == 17
    assert busy[-1] == 0, "however few they are, it is busy: chains alone"


def test_a_driver_that_knows_not_what_it_works_grants_as_ever() -> None:
    assert set(_branches_granted(0.0)) == {17}
