"""The scheduler on short scripts: events in, instructions out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from cluster.decoding.events import (
    Admitted,
    Cancelled,
    DrafterJoined,
    SequenceVerdict,
    StepDone,
    TargetJoined,
    Tick,
)
from cluster.decoding.instructions import (
    CloseDraft,
    Emit,
    Finish,
    FinishReason,
    OpenDraft,
    RunStep,
    SendGrant,
    SendOutcome,
    WakeAt,
)
from cluster.decoding.scheduler import Scheduler
from paceline.options import Stopping
from tests.cluster.decoding.scripts import (
    PROMPT,
    proposal,
    started,
    the_step,
    verdict,
)
from tests.cluster.decoding.true_text import END_TOKEN, request
from workers.drafting.tree import Grant


def test_admission_prefills_and_opens_the_draft() -> None:
    scheduler = Scheduler()
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    scheduler.handle(DrafterJoined(0, "d", 1000))
    step, opened, grant = scheduler.handle(Admitted(0, request(1, PROMPT)))
    assert isinstance(step, RunStep)
    assert [(s.start, s.token_ids, s.window, s.verdict) for s in step.slices] == [
        (0, PROMPT, 0, True)
    ]
    assert isinstance(opened, OpenDraft)
    assert opened.token_ids == PROMPT
    # two windows of 4 and the token between them
    assert grant == SendGrant("d", 1, Grant(3 + 9, nodes=9, drafting_is_free=True))


def test_chain_takes_what_has_arrived_and_reports_the_outcome_after_the_step() -> None:
    scheduler = started()
    assert scheduler.handle(proposal(PROMPT, 10)) == []
    assert scheduler.handle(proposal((*PROMPT, 10), 11, 12)) == []
    out = scheduler.handle(verdict(1, 0, 10))
    # The target chose what the drafter had guessed, so the run-ahead stays.
    assert the_step(out).slices[0].token_ids == (10, 11, 12)
    assert the_step(out).slices[0].window == 2
    assert out[1] == SendOutcome("d", 1, 3, (10,))
    assert out[-1] == Emit(1, 0, (10,), 0)


def test_a_diverging_verdict_drops_the_run_ahead_and_late_drafts_of_it() -> None:
    scheduler = started()
    scheduler.handle(proposal(PROMPT, 10, 11, 12))
    out = scheduler.handle(verdict(1, 0, 10))
    out = scheduler.handle(verdict(2, 1, 40))
    assert the_step(out).slices[0].token_ids == (40,)
    assert Emit(1, 1, (11, 40), 1) in out
    scheduler.handle(proposal((*PROMPT, 10, 11, 12), 13))
    assert scheduler.totals.dropped_proposals == 1
    assert the_step(scheduler.handle(verdict(3, 0, 41))).slices[0].token_ids == (41,)


def test_a_bonus_guess_that_arrives_late_is_compared_when_it_comes() -> None:
    scheduler = started()
    scheduler.handle(proposal(PROMPT, 10, 11))
    scheduler.handle(verdict(1, 0, 10))
    scheduler.handle(verdict(2, 1, 12))  # The bonus; the drafter's own guess is still under way.
    scheduler.handle(proposal((*PROMPT, 10, 11), 12, 13))
    assert the_step(scheduler.handle(verdict(3, 0, 13))).slices[0].token_ids == (13,)
    assert scheduler.totals.dropped_proposals == 0


def test_lockstep_waits_for_a_full_window_and_no_longer_than_its_bound() -> None:
    scheduler = started("lockstep", window=2)
    out = scheduler.handle(verdict(1, 0, 10, now=1.0))
    assert WakeAt(3.0) in out
    assert not any(isinstance(each, RunStep) for each in out)
    path = (*PROMPT, 10)
    assert scheduler.handle(proposal(path, 11)) == []
    out = scheduler.handle(proposal((*path, 11), 12))
    assert the_step(out).slices[0].window == 2
    scheduler.handle(verdict(2, 2, 13, now=5.0))
    assert scheduler.handle(Tick(6.0)) == [WakeAt(7.0)]
    assert the_step(scheduler.handle(Tick(7.0))).slices[0].token_ids == (13,)


def test_lockstep_does_not_wait_for_a_drafter_that_has_no_more() -> None:
    scheduler = started("lockstep", window=4)
    scheduler.handle(verdict(1, 0, 10))
    out = scheduler.handle(proposal((*PROMPT, 10), last=True))
    assert the_step(out).slices[0].window == 0


@pytest.mark.parametrize("branches", [1, 2])
def test_lockstep_does_not_wait_for_candidates_of_the_last_token(branches: int) -> None:
    """The grant does not reach that position, so the drafter never says that no more will come."""
    scheduler = started("lockstep", window=4, max_tokens=2, branches=branches)
    assert the_step(scheduler.handle(verdict(1, 0, 10))).slices[0].window == 0


def test_the_time_to_draft_is_part_of_what_tokens_cost() -> None:
    scheduler = Scheduler(wait_seconds=2.0)
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    scheduler.handle(DrafterJoined(0, "d", 1000))
    wanted = request(1, PROMPT, policy="lockstep", window=1)
    scheduler.handle(Admitted(0, dataclasses.replace(wanted, stopping=Stopping.COST)))
    path: tuple[int, ...] = PROMPT
    for step, now in enumerate((1.0, 1.1, 1.2, 1.3), start=1):
        out = scheduler.handle(verdict(step, 0, 10 + step, now=now))
        path = (*path, 10 + step)
        scheduler.handle(proposal(path, 40))
    (grant,) = [one.grant for one in out if isinstance(one, SendGrant)]
    assert grant.tokens_per_ms == pytest.approx(0.01), "a token each 100 ms, most of them waits"


def test_off_wants_no_drafter() -> None:
    scheduler = Scheduler()
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    scheduler.handle(DrafterJoined(0, "d", 1000))
    out = scheduler.handle(Admitted(0, request(1, PROMPT, policy="off")))
    assert [type(each) for each in out] == [RunStep]


def test_an_end_token_inside_the_accepted_window_ends_the_text_there() -> None:
    scheduler = started()
    scheduler.handle(proposal(PROMPT, 10, END_TOKEN, 12))
    scheduler.handle(verdict(1, 0, 10))
    out = scheduler.handle(verdict(2, 2, 30))
    assert Emit(1, 1, (END_TOKEN,), 1) in out
    assert CloseDraft("d", 1) in out
    finish = next(each for each in out if isinstance(each, Finish))
    assert finish.reason is FinishReason.STOP
    assert (finish.stats.steps, finish.stats.drafted, finish.stats.accepted) == (2, 2, 1)
    # The shards are told with the next step: one of its own would keep that waiting.
    assert not any(isinstance(each, RunStep) for each in out)
    out = scheduler.handle(Admitted(4, request(2, PROMPT, policy="off")))
    assert the_step(out).close == (1,)
    scheduler.check_integrity()


def test_max_tokens_is_never_overrun() -> None:
    scheduler = started(max_tokens=3)
    scheduler.handle(proposal(PROMPT, 10, 11, 12))
    out = scheduler.handle(verdict(1, 0, 10))
    assert the_step(out).slices[0].window == 1  # one of three is out, one is the target's own
    out = scheduler.handle(verdict(2, 1, 12))
    assert Emit(1, 1, (11, 12), 1) in out
    assert next(e for e in out if isinstance(e, Finish)).reason is FinishReason.LENGTH


def test_a_stop_string_cuts_inside_the_window() -> None:
    class Scanner:
        def first_stop(self, token_ids: Sequence[int]) -> int | None:
            return token_ids.index(11) + 1 if 11 in token_ids else None

    scheduler = Scheduler()
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    scheduler.handle(DrafterJoined(0, "d", 1000))
    asked = dataclasses.replace(request(1, PROMPT), stop_scanner=Scanner())
    scheduler.handle(Admitted(0, asked))
    scheduler.handle(proposal(PROMPT, 10, 11, 12))
    scheduler.handle(verdict(1, 0, 10))
    out = scheduler.handle(verdict(2, 2, 13))
    assert Emit(1, 1, (11,), 1) in out
    assert next(e for e in out if isinstance(e, Finish)).reason is FinishReason.STOP


def test_a_cancelled_sequence_keeps_its_blocks_until_its_step_is_done() -> None:
    scheduler = started()
    assert scheduler.handle(Cancelled(0.5, 1)) == []
    scheduler.check_integrity()
    out = scheduler.handle(verdict(1, 0, 10))
    assert next(e for e in out if isinstance(e, Finish)).reason is FinishReason.CANCELLED
    assert not any(isinstance(each, Emit) for each in out)
    scheduler.check_integrity()


def test_the_next_step_goes_out_before_anything_is_counted_or_told() -> None:
    scheduler = started()
    scheduler.handle(proposal(PROMPT, 10, 11, 12))
    (step,) = scheduler.steps_for(verdict(1, 0, 10))
    assert step.slices[0].token_ids == (10, 11, 12)
    assert scheduler.totals.counts.committed == 0
    with pytest.raises(AssertionError, match="before the rest of the last one"):
        scheduler.steps_for(Tick(1.0))
    out = scheduler.messages()
    assert out[0] == SendOutcome("d", 1, 3, (10,))
    assert out[-1] == Emit(1, 0, (10,), 0)
    assert scheduler.totals.counts.committed == 1
    assert scheduler.messages() == []


def test_who_waits_for_its_drafter_does_not_hold_up_the_others_step() -> None:
    scheduler = started("pearl", window=4)
    scheduler.handle(Admitted(0.2, request(2, (4, 5), policy="off")))
    scheduler.handle(proposal(PROMPT, 10, 11))
    scheduler.handle(verdict(1, 0, 10))
    scheduler.steps_for(StepDone(1.1, 2, (SequenceVerdict(2, 0, 20),)))
    before = scheduler.totals.counts.committed
    scheduler.messages()
    (step,) = scheduler.steps_for(StepDone(1.2, 3, (SequenceVerdict(2, 0, 21),)))
    assert [part.sequence_id for part in step.slices] == [2], "the first one waits for a window"
    assert before == 1
    assert scheduler.totals.counts.committed == 2, "what the answer brought is not counted yet"
    scheduler.messages()
    assert scheduler.totals.counts.committed == 3


def test_who_comes_in_is_opened_after_drafters_heard_of_the_step_before() -> None:
    scheduler = started()
    scheduler.handle(Admitted(0.5, request(2, (4, 5))))
    scheduler.steps_for(verdict(1, 0, 10))
    told = [type(one) for one in scheduler.messages()]
    assert told.index(SendOutcome) < told.index(OpenDraft)
