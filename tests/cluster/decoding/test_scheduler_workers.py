"""Workers that are lost, lie, or answer another question; and what drafters are told."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.decoding.events import (
    Admitted,
    DrafterJoined,
    DrafterLost,
    MalformedProposal,
    Proposal,
    Proposed,
    SequenceVerdict,
    StepDone,
    TargetJoined,
    TargetLost,
)
from cluster.decoding.instructions import (
    Emit,
    OpenDraft,
    RunStep,
    SendGrant,
    Suspect,
)
from cluster.decoding.scheduler import Scheduler
from paceline.errors import ProtocolError
from paceline.options import Stopping
from paceline.prefix_hash import hash_prefix
from tests.cluster.decoding.scripts import (
    PROMPT,
    proposal,
    started,
    started_with,
    the_step,
    tree_request,
    verdict,
)
from tests.cluster.decoding.true_text import request


def test_a_lost_drafter_leaves_the_sequence_to_another_and_its_drafts_stay_valid() -> None:
    scheduler = started()
    scheduler.handle(DrafterJoined(0, "e", 1000))
    scheduler.handle(proposal(PROMPT, 10, 11))
    out = scheduler.handle(DrafterLost(0.6, "d"))
    assert out[0] == OpenDraft("e", 1, request(1, PROMPT).spec, PROMPT, vocab_size=50)
    out = scheduler.handle(verdict(1, 0, 10))
    assert the_step(out).slices[0].token_ids == (10, 11)


def test_a_lost_target_is_prefilled_again_from_committed_tokens() -> None:
    scheduler = started()
    scheduler.handle(verdict(1, 0, 10))
    assert scheduler.handle(TargetLost(2)) == []
    out = scheduler.handle(TargetJoined(3, 50, 1000, 4, 64))
    part = the_step(out).slices[0]
    assert (part.start, part.token_ids, part.verdict) == (0, (*PROMPT, 10), True)
    assert the_step(out).step == 1, "steps count from 1 on a fresh stream"


def test_three_malformed_proposals_make_a_drafter_suspect() -> None:
    scheduler = started()
    for _ in range(2):
        assert scheduler.handle(MalformedProposal(0.5, "d")) == []
    assert scheduler.handle(MalformedProposal(0.5, "d")) == [
        Suspect("d", "3 of its proposals were malformed")
    ]
    out = scheduler.handle(verdict(1, 0, 10))
    assert [type(each) for each in out] == [RunStep, Emit], "it goes on plainly"
    assert scheduler.handle(DrafterLost(1, "d")) == []


def test_a_drafter_that_does_not_fit_the_rule_is_not_asked() -> None:
    scheduler = Scheduler()
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    scheduler.handle(DrafterJoined(0, "n", 1000, kind="ngram", rules=frozenset({"coupled"})))
    out = scheduler.handle(Admitted(0, tree_request("rejection", branches=1)))
    assert [type(each) for each in out] == [RunStep]


def test_stopping_by_cost_is_told_what_steps_cost_and_bring() -> None:
    scheduler = started_with(dataclasses.replace(request(1, PROMPT), stopping=Stopping.COST))
    scheduler.handle(verdict(1, 0, 10, now=1.0))
    answers = [
        StepDone(1.01 + i / 100, 2 + i, (SequenceVerdict(1, 0, 11),), 0.01) for i in range(3)
    ]
    out = [each for answer in answers for each in scheduler.handle(answer)]
    assert [each.grant.tokens_per_ms for each in out if isinstance(each, SendGrant)][-1] > 0


@pytest.mark.parametrize(
    "answer",
    [
        verdict(9, 0, 10),
        StepDone(1, 1, ()),
        verdict(1, 1, 10),
        verdict(1, 0, 50),
        StepDone(1, 1, (SequenceVerdict(2, 0, 10),)),
    ],
)
def test_an_answer_to_another_question_is_refused_and_changes_nothing(answer: StepDone) -> None:
    scheduler = started()
    with pytest.raises(ProtocolError):
        scheduler.handle(answer)
    assert Emit(1, 0, (10,), 0) in scheduler.handle(verdict(1, 0, 10))


def test_passes_of_one_message_share_its_time() -> None:
    """A pass is the price of one more token, however many passes a message tells of."""
    for passes in (1, 4):
        scheduler = started("fanout", window=4)
        scheduler.handle(verdict(1, 0, 10))
        told = proposal((*PROMPT, 10), 11, 12)
        scheduler.handle(dataclasses.replace(told, pass_seconds=0.002 * passes, passes=passes))
        assert scheduler._state.drafters._drafters["d"].pass_ms == pytest.approx(2.0)


def test_what_is_under_way_when_a_grant_shrinks_is_taken() -> None:
    """A drafter sends nothing twice, so later drafts would hang on what was dropped."""
    scheduler = started("fanout", window=4)
    scheduler.handle(verdict(1, 0, 10))
    slow = dataclasses.replace(proposal((*PROMPT, 10), 11, 12), pass_seconds=1.0)
    scheduler.handle(slow)
    scheduler.handle(dataclasses.replace(verdict(2, 0, 11), step_seconds=0.02))
    out = scheduler.handle(verdict(3, 1, 13))
    granted = next(one.grant for one in out if isinstance(one, SendGrant))
    assert granted.nodes == 19, "a drafter so slow gets two branches"
    path = (*PROMPT, 10, 11, 12, 13)
    siblings = tuple(range(20, 44))
    wide = Proposal(1, len(path), hash_prefix(path), siblings, parents=(0,) * len(siblings))
    scheduler.handle(Proposed(1.5, "d", (wide,)))
    scheduler.handle(verdict(4, 0, siblings[-1]))
    assert scheduler.totals.counts.branch_hits == 1
    scheduler.check_integrity()
