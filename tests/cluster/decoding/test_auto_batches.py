"""The controller of `auto` on scripted verdicts of many sequences: who decides together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from cluster.decoding.auto.chooser import FIRST_TRIED, SHARE_TRIED, Chooser
from cluster.decoding.auto.cohorts import (
    CHAIN,
    FIRST_STANDS,
    OFF,
    STANDS,
    TREE_WIDTH,
    Acceptance,
    Cohorts,
    Pilot,
    Plan,
    choice_of,
)
from cluster.decoding.events import Proposal, Proposed, StepDone
from cluster.decoding.instructions import RunStep, Slice
from cluster.decoding.token_tree import TokenTree
from tests.cluster.decoding.scripts import verdict_of
from tests.cluster.decoding.true_text import request


class Batch:
    """Sequences that step together: steps of 20 ms, passes of 2 ms, `row_ms` for each row.

    The driver works `proposal_ms` on a proposal. A step ends when the driver has read all proposals
    that came during it.
    """

    def __init__(self, count: int, *, row_ms: float = 0.0, proposal_ms: float = 0.0) -> None:
        self.row_ms, self.proposal_ms = row_ms, proposal_ms
        self.controller = Chooser()
        self.pilots = [
            Pilot.of(request(number, (7, 8, 9), policy="auto", window=8)) for number in range(count)
        ]
        for pilot in self.pilots:
            self.controller.admitted(pilot)
        self.now = 0.0
        self.step = 0
        self.most_tried = 0

    def go(self, steps: int, right: Sequence[bool]) -> None:
        """Answer `steps` steps. The candidates of a sequence are all right or all wrong, as `right`
        says.
        """
        for _ in range(steps):
            self._step(right)

    def choices(self, steps: int, right: Sequence[bool]) -> list[Counter[str]]:
        """The choices of each sequence in the next `steps` steps."""
        for pilot in self.pilots:
            pilot.choices.clear()
        self.go(steps, right)
        return [Counter(pilot.choices) for pilot in self.pilots]

    def _step(self, right: Sequence[bool]) -> None:
        self.step += 1
        windows = [0 if pilot.rests else min(4, pilot.window) for pilot in self.pilots]
        drafting = [number for number, pilot in enumerate(self.pilots) if not pilot.rests]
        if self.step == 1:
            drafting, windows = [], [0] * len(windows)  # Nothing was drafted yet.
        slices = tuple(
            Slice(number, 2, (9,) * (1 + window), window, True, ())
            for number, window in enumerate(windows)
        )
        self.controller.beliefs.steps.sent(self.now, RunStep(self.step, (), (), slices))
        for number_of_pass in range(1, 9):
            proposals = tuple(Proposal(number, 3, 0, (5,)) for number in drafting)
            if proposals:
                at = self.now + 0.002 * number_of_pass
                self.controller.drafted(Proposed(at, "d", proposals, 0.002))
        driver_ms = self.proposal_ms * (len(self.pilots) + 8 * len(drafting))
        device_ms = 20 + self.row_ms * sum(windows)
        self.now += max(device_ms, driver_ms) / 1000
        done = StepDone(
            self.now, self.step, (), step_seconds=device_ms / 1000, driver_seconds=driver_ms / 1000
        )
        self.controller.answered(done, num_drafters=1)
        self.most_tried = max(self.most_tried, sum(pilot.trying for pilot in self.pilots))
        tree = TokenTree((7, 8, 9))
        for pilot, window, is_right in zip(self.pilots, windows, right, strict=True):
            accepted = window if is_right else 0
            counted = verdict_of(window, accepted)
            self.controller.judged(pilot, counted, self.now, "d", tree)


def test_those_whose_drafts_fail_are_cut_and_the_others_go_on() -> None:
    right = [number % 2 == 0 for number in range(16)]
    batch = Batch(16)
    batch.go(60, right)
    for is_right, choices in zip(right, batch.choices(60, right), strict=True):
        assert (choices["off"] < 6) is is_right
        assert (choices["off"] > 40) is not is_right


def test_a_cohort_begins_with_what_its_first_member_has_shown() -> None:
    usual = Acceptance(0.85)
    pilot = Pilot.of(request(1, (7, 8, 9), policy="auto", window=8))
    pilot.meets("d", usual)
    while pilot.acceptance.mean > 0.6:
        pilot.acceptance.add((False,))
    cohort = Cohorts().of(pilot, "d", usual)
    assert cohort.like.level == -1
    assert cohort.acceptance.mean == pytest.approx(pilot.acceptance.mean)


def test_what_is_tried_beside_those_that_rest_is_looked_at_soon() -> None:
    pilot = Pilot.of(request(1, (7, 8, 9), policy="auto", window=8))
    cohort = Cohorts().of(pilot, "d", Acceptance(0.85))
    cohort.plan, cohort.rest_for, cohort.decisions = Plan(OFF, 1), 16, 9
    cohort.members = cohort.decided_for = 64
    cohort.seen_at = FIRST_STANDS
    assert not cohort.overdue(FIRST_STANDS), "all rest"
    cohort.trial = Plan(choice_of(CHAIN.policy, TREE_WIDTH), 8)
    assert cohort.overdue(FIRST_STANDS)


def test_few_of_a_batch_are_tried_at_a_time() -> None:
    """Until something is known, eight are tried; then one in sixteen, and not always the same."""
    batch = Batch(64)
    wrong = [False] * 64
    batch.go(20, wrong)
    assert batch.most_tried == FIRST_TRIED
    batch.most_tried = 0
    choices = batch.choices(400, wrong)
    assert 0 < batch.most_tried <= 64 // SHARE_TRIED
    assert sum(one["chain"] > 0 for one in choices) > 48, "each has its turn"


def test_a_batch_that_keeps_the_driver_busy_rests_and_one_that_does_not_drafts() -> None:
    """A step has eight passes, each with a proposal for each of 64 sequences."""
    right = [True] * 64
    for proposal_ms, drafts in ((0.0, True), (0.1, True), (1.0, False)):
        batch = Batch(64, proposal_ms=proposal_ms)
        batch.go(60, right)
        off = sum((one["off"] for one in batch.choices(40, right)), 0)
        assert (off < 64 * 40 * 0.2) is drafts, f"{proposal_ms} ms a proposal"


def test_candidates_that_are_dear_for_the_whole_batch_are_not_tried_at_all() -> None:
    """For one sequence alone, rows of 1 ms pay in a step of 20 ms."""
    right = [True] * 64
    batch = Batch(64, row_ms=1.0)
    batch.go(60, right)
    off = sum((one["off"] for one in batch.choices(40, right)), 0)
    assert off > 64 * 40 * 0.8
    alone = Batch(1, row_ms=1.0)
    alone.go(60, right[:1])
    assert alone.choices(40, right[:1])[0]["off"] < 8


def test_a_step_that_takes_far_longer_than_believed_has_choices_made_anew() -> None:
    right = [True] * 16
    batch = Batch(16)
    batch.go(60, right)
    batch.row_ms = 25.0
    # Down to no candidates by way of smaller windows, of which each must be seen to be as dear.
    batch.go(2 * STANDS, right)
    assert sum(pilot.rests for pilot in batch.pilots) >= 12, "four choices in the time of two"
