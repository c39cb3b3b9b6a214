"""The controller of `auto` on scripted verdicts: what it cuts, probes, keeps and bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cluster.decoding.auto.chooser import Chooser
from cluster.decoding.auto.cohorts import FIRST_PROBE, RESTING, Acceptance, Pilot
from cluster.decoding.events import (
    Admitted,
    DrafterJoined,
    Proposal,
    Proposed,
    StepDone,
    TargetJoined,
)
from cluster.decoding.instructions import Instruction, RunStep, Slice
from cluster.decoding.scheduler import Scheduler
from cluster.decoding.token_tree import TokenTree
from tests.cluster.decoding.scripts import PROMPT, proposal, verdict, verdict_of
from tests.cluster.decoding.true_text import request

PROPOSAL = Proposal(1, 3, 0, (5,))


class Script:
    """One sequence: steps of 20 ms, passes of 2 ms, the first candidate 4 ms after a verdict.

    `row_ms`: the time that each candidate adds to a step.
    """

    def __init__(self, *, row_ms: float = 0.0) -> None:
        self.row_ms = row_ms
        self.controller = Chooser()
        self.pilot = Pilot.of(request(1, (7, 8, 9), policy="auto", window=8))
        self.tree = TokenTree((7, 8, 9))
        self.now = 0.0
        self.step = 0

    def verdict(self, *, window: int, accepted: int) -> None:
        """A step with `window` candidates, of which `accepted` are right. No candidate is held
        after it.
        """
        self.step += 1
        part = Slice(1, 2, (9,) * (1 + window), window, True, ())
        self.controller.beliefs.steps.sent(self.now, RunStep(self.step, (), (), (part,)))
        self.controller.drafted(Proposed(self.now + 0.004, "d", (PROPOSAL,), 0.002))
        self.controller.beliefs.attached(
            self.pilot, Proposed(self.now + 0.004, "d", (PROPOSAL,), 0.002)
        )
        seconds = (20 + self.row_ms * window) / 1000
        self.now += seconds
        done = StepDone(self.now, self.step, (), step_seconds=seconds)
        self.controller.answered(done, num_drafters=1)
        counted = verdict_of(window, accepted)
        self.controller.judged(self.pilot, counted, self.now, "d", self.tree)

    def go(self, count: int, *, right: bool) -> None:
        """`count` verdicts on windows of the wanted size, all right or all wrong."""
        for _ in range(count):
            window = 0 if self.pilot.policy is RESTING else min(4, self.pilot.window)
            self.verdict(window=window, accepted=window if right else 0)


def test_drafts_that_fail_are_cut_and_probed_at_growing_intervals() -> None:
    script = Script()
    script.go(100, right=False)
    pilot = script.pilot
    assert pilot.choices["off"] > 50
    assert pilot.probe_after > FIRST_PROBE
    probes = []
    for number in range(600):
        was_resting = pilot.policy is RESTING
        script.go(1, right=False)
        if was_resting and pilot.policy is not RESTING:
            probes.append(number)
    gaps = [later - earlier for earlier, later in pairwise(probes)]
    assert len(gaps) >= 2
    assert all(later > 1.5 * earlier for earlier, later in pairwise(gaps))
    assert pilot.estimates["acceptance"] < 0.1


def test_a_request_whose_drafts_come_right_again_drafts_again() -> None:
    script = Script()
    script.go(100, right=False)
    cut = script.pilot.choices["off"]
    script.go(150, right=True)
    script.pilot.choices.clear()
    script.go(50, right=True)
    assert cut > 0
    assert "off" not in script.pilot.choices
    assert script.pilot.window == 8


def test_candidates_that_cost_as_much_as_they_bring_are_cut() -> None:
    """Each candidate adds the time of a whole step, so none pays, even if all are right."""
    script = Script(row_ms=25.0)
    for window in (0, 1, 2, 0, 1, 2):
        script.verdict(window=window, accepted=window)
    script.go(80, right=True)
    script.pilot.choices.clear()
    script.go(40, right=True)
    assert script.pilot.choices["off"] > 20


def test_it_does_not_flap_between_equals() -> None:
    script = Script()
    changes, before = 0, script.pilot.choice
    for number in range(400):
        # Three of four right: as lucky as it gets in any eight verdicts.
        script.go(1, right=number % 4 != 0)
        changes += script.pilot.choice is not before
        before = script.pilot.choice
    assert changes <= 12, "of fifty choices"


def test_it_waits_for_no_drafter_longer_than_drafting_takes() -> None:
    script = Script()
    script.go(40, right=True)
    assert script.pilot.patience < 0.1


def test_what_it_believes_is_told() -> None:
    script = Script(row_ms=0.5)
    script.verdict(window=0, accepted=0)
    script.go(40, right=True)
    estimates = script.pilot.estimates
    assert abs(estimates["step_ms"] - 20) < 0.5
    assert abs(estimates["pass_ms"] - 2) < 0.01
    assert abs(estimates["round_trip_ms"] - 1) < 0.1
    assert estimates["acceptance"] > 0.9
    assert estimates["tokens_per_ms"] > estimates["plain_tokens_per_ms"]
    assert script.controller.beliefs.estimates()["d.pass_ms"] == estimates["pass_ms"]


def test_a_scheduler_that_serves_no_auto_does_the_same_and_believes_nothing() -> None:
    def decode(*, serves_auto: bool) -> tuple[list[Instruction], dict[str, float]]:
        scheduler = Scheduler(wait_seconds=2.0, serves_auto=serves_auto)
        asked = request(1, PROMPT, policy="chain")
        events = (
            TargetJoined(0, 50, 1000, 4, 64),
            DrafterJoined(0, "d", 1000),
            Admitted(0, asked),
            proposal(PROMPT, 10, 11, 12),
            verdict(1, 0, 10),
            verdict(2, 2, 13, now=2.0),
        )
        out = [one for event in events for one in scheduler.handle(event)]
        return out, dict(scheduler.speculation().estimates)

    told, believed = decode(serves_auto=True)
    assert believed["step_ms"] > 0
    assert decode(serves_auto=False) == (told, {})


def test_a_scheduler_that_serves_no_auto_is_given_none() -> None:
    scheduler = Scheduler(serves_auto=False)
    with pytest.raises(AssertionError, match="nothing to choose"):
        scheduler.handle(Admitted(0, request(1, PROMPT, policy="auto")))


def test_acceptance_leans_on_its_prior_until_there_is_evidence() -> None:
    drafter = Acceptance(0.7)
    sequence = Acceptance(drafter)
    assert sequence.chances(3) == pytest.approx((0.7,) * 3)
    for _ in range(60):
        drafter.add((True, True, False))  # 1, 1, 0
    assert drafter.chance(1) > 0.95
    assert drafter.chance(3) < 0.1
    assert sequence.chance(1) == pytest.approx(drafter.mean), "of the sequence nothing is known yet"
    for _ in range(60):
        sequence.add((False,))
    assert sequence.chance(1) < 0.1
    assert sequence.candidates == 60


def test_acceptance_follows_a_change() -> None:
    acceptance = Acceptance(0.7)
    for _ in range(200):
        acceptance.add((True,))
    for _ in range(100):
        acceptance.add((False,))
    assert acceptance.chance(1) < 0.15


def test_what_many_sequences_tell_at_a_time_lasts_as_long_as_what_one_tells() -> None:
    """Compares ten steps of rejections of one sequence with ten of each of 32 sequences."""
    one, many = Acceptance(0.9), Acceptance(0.9)
    for _ in range(10):
        one.add((False,))
        for _ in range(32):
            many.add((False,), sequences=32)
    steps = 0
    while many.chance(1) < 0.5:
        for _ in range(32):
            many.add((True,), sequences=32)
        steps += 1
    assert 4 < steps < 20, "not at the first step, and not much later than the ten"
