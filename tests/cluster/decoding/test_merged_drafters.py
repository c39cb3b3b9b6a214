"""Candidates of several kinds of drafters in one tree: who drafts, and what a step verifies."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.decoding.events import (
    Admitted,
    DrafterJoined,
    DrafterLost,
    FedTopTokens,
    Proposal,
    Proposed,
    SequenceVerdict,
    StepDone,
    TargetJoined,
    TopTokens,
)
from cluster.decoding.instructions import Emit, Instruction, OpenDraft, SendGrant, SendOutcome
from cluster.decoding.scheduler import Scheduler
from cluster.driver.fitting import check_merge, rules_by_kind
from paceline.errors import InvalidRequestError
from paceline.prefix_hash import hash_prefix
from tests.cluster.decoding.scripts import PROMPT, the_step, verdict
from tests.cluster.decoding.true_text import request
from workers.verification.rule import RULES


def started(
    *kinds: str, window: int = 4, rule: str = "coupled"
) -> tuple[Scheduler, list[Instruction]]:
    """A scheduler with a drafter of each kind, named after it, and the merged sequence 1."""
    scheduler = Scheduler()
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    for kind in kinds:
        scheduler.handle(DrafterJoined(0, kind, 1000, kind=kind, rules=frozenset(RULES)))
    asked = request(1, PROMPT, window=window, merge=True)
    asked = dataclasses.replace(asked, spec=dataclasses.replace(asked.spec, rule=rule))
    return scheduler, scheduler.handle(Admitted(0, asked))


def proposes(drafter: str, path: tuple[int, ...], *token_ids: int) -> Proposed:
    return Proposed(0.5, drafter, (Proposal(1, len(path), hash_prefix(path), token_ids),))


def opened(instructions: list[Instruction]) -> list[str]:
    return [one.drafter for one in instructions if isinstance(one, OpenDraft)]


def test_one_drafter_of_each_kind_works_for_the_sequence_the_model_first() -> None:
    _, out = started("ngram", "model", "recycling")
    assert opened(out) == ["model", "ngram", "recycling"]
    grants = [one for one in out if isinstance(one, SendGrant)]
    assert [(one.drafter, one.grant.shares) for one in grants] == [
        ("model", 0),
        ("ngram", 0),
        ("recycling", 0),
    ], "none shares with another"


@pytest.mark.parametrize("rule", ["coupled", "one-hot"])
def test_a_step_verifies_candidates_of_all_of_them_in_one_tree(rule: str) -> None:
    scheduler, _ = started("model", "ngram", rule=rule)
    path = (*PROMPT, 10)
    scheduler.handle(verdict(1, 0, 10))
    scheduler.handle(proposes("model", path, 20, 21))
    scheduler.handle(proposes("ngram", path, 20, 30))
    scheduler.handle(proposes("ngram", path, 40))
    step = the_step(scheduler.handle(verdict(2, 0, 20)))
    assert step.slices[0].token_ids == (20, 21, 30), "what agreed is one candidate"
    assert step.slices[0].parents == (0, 0)
    accepted = StepDone(1.0, 3, (SequenceVerdict(1, 1, 31, accepted=(1,)),))
    out = scheduler.handle(accepted)
    assert Emit(1, 2, (30, 31), 1) in out, "the other drafter's candidate was right"


def test_a_kind_that_joins_later_is_taken_in_and_one_that_is_lost_leaves() -> None:
    scheduler, out = started("model")
    assert opened(out) == ["model"]
    out = scheduler.handle(DrafterJoined(1, "ngram", 1000, kind="ngram", rules=frozenset(RULES)))
    assert opened(out) == ["ngram"]
    scheduler.handle(DrafterLost(2, "model"))
    scheduler.check_integrity()
    scheduler.handle(proposes("ngram", PROMPT, 10, 30))
    step = the_step(scheduler.handle(verdict(1, 0, 10)))
    assert step.slices[0].token_ids == (10, 30), "the other goes on alone"


def test_a_drafter_that_learns_from_the_target_goes_on_learning_without_the_first() -> None:
    scheduler, _ = started("model")
    joined = DrafterJoined(1, "recycling", 1000, kind="recycling", wants_top_tokens=True)
    scheduler.handle(joined)
    assert the_step(scheduler.handle(verdict(1, 0, 10))).slices[0].top_tokens
    scheduler.handle(DrafterLost(2, "model"))
    assert the_step(scheduler.handle(verdict(2, 0, 11))).slices[0].top_tokens


def test_what_the_target_tells_of_a_prompt_goes_to_who_learns_at_once() -> None:
    """The prompt comes in two pieces; the first has no verdict."""
    scheduler = Scheduler(max_num_seqs=1, max_step_tokens=2)
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    for kind in ("model", "recycling"):
        learns = kind == "recycling"
        scheduler.handle(DrafterJoined(0, kind, 1000, kind=kind, wants_top_tokens=learns))
    step = the_step(scheduler.handle(Admitted(1, request(1, PROMPT, merge=True))))
    assert not step.slices[0].verdict
    top = (TopTokens(PROMPT[0], (7, 8)),)
    done = StepDone(2, step.step, (), fed=(FedTopTokens(1, top), FedTopTokens(99, top)))
    told = [one for one in scheduler.handle(done) if isinstance(one, SendOutcome)]
    assert told == [SendOutcome("recycling", 1, len(PROMPT), (), top)]
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("policy", "rule", "kinds", "said"),
    [
        ("chain", "rejection", {"model", "ngram"}, "'model' and 'ngram'.*'rejection'"),
        ("chain", "kseq", None, "'coupled' and 'one-hot', got 'kseq'"),
        ("pearl", "coupled", {"model", "ngram"}, "'pearl' cannot merge .* drafts only chains"),
        ("spread", "coupled", {"model", "ngram"}, "shares out its drafters itself"),
        ("chain", "coupled", {"model"}, "at least two kinds.*got 'model'"),
        ("chain", "one-hot", {"model", "ngram"}, "at least two kinds.*got 'ngram'"),
    ],
)
def test_what_cannot_be_merged_is_refused_with_the_reason(
    policy: str, rule: str, kinds: set[str] | None, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        check_merge(policy, rule, None if kinds is None else rules_by_kind(kinds))


def test_what_can_be_merged_is_not() -> None:
    check_merge("auto", "coupled", rules_by_kind(("model", "ngram", "recycling")))
    check_merge("chain", "one-hot", rules_by_kind(("ngram", "recycling")))
