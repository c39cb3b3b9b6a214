"""The scheduler on short scripts: events in, instructions out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from cluster.decoding.events import (
    Admitted,
    Cancelled,
    DrafterJoined,
    DrafterLost,
    MalformedProposal,
    Proposal,
    Proposed,
    Request,
    SequenceVerdict,
    StepDone,
    TargetJoined,
    TargetLost,
    Tick,
)
from cluster.decoding.instructions import (
    CloseDraft,
    Emit,
    Finish,
    FinishReason,
    Grant,
    Instruction,
    OpenDraft,
    RunStep,
    SendOutcome,
    Suspect,
    WakeAt,
)
from cluster.decoding.policies import PolicyName
from cluster.decoding.scheduler import Scheduler
from cluster.decoding.step_costs import StepCosts
from paceline.errors import ProtocolError
from paceline.prefix_hash import hash_prefix
from paceline.rules import Rule, Stopping
from tests.cluster.decoding.world import END_TOKEN, PretendedDrafter, World, request, true_token

PROMPT = (7, 8, 9)


def started(policy: PolicyName = PolicyName.CHAIN, **options: int) -> Scheduler:
    """A scheduler with a target, one drafter and sequence 1 decoding after its prompt's step."""
    scheduler = Scheduler(wait_seconds=2.0)
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    scheduler.handle(DrafterJoined(0, "d", 1000))
    scheduler.handle(Admitted(0, request(1, PROMPT, policy=policy, **options)))
    return scheduler


def verdict(step: int, accepted: int, token: int, now: float = 1.0) -> StepDone:
    return StepDone(now, step, (SequenceVerdict(1, accepted, token),))


def proposal(path: Sequence[int], *token_ids: int, last: bool = False) -> Proposed:
    made = Proposal(1, len(path), hash_prefix(path), token_ids, last)
    return Proposed(0.5, "d", (made,))


def the_step(instructions: list[Instruction]) -> RunStep:
    assert isinstance(instructions[0], RunStep), "the step goes out before all else"
    return instructions[0]


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
    assert grant == Grant(
        "d", 1, 3 + 9, nodes=9, drafting_is_free=True
    )  # two windows of 4 and the token between them


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
    scheduler = started(PolicyName.LOCKSTEP, window=2)
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
    scheduler = started(PolicyName.LOCKSTEP, window=4)
    scheduler.handle(verdict(1, 0, 10))
    out = scheduler.handle(proposal((*PROMPT, 10), last=True))
    assert the_step(out).slices[0].window == 0


def test_off_wants_no_drafter() -> None:
    scheduler = Scheduler()
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    scheduler.handle(DrafterJoined(0, "d", 1000))
    out = scheduler.handle(Admitted(0, request(1, PROMPT, policy=PolicyName.OFF)))
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
    # The shards are told at once, though there is nothing else to do.
    assert the_step(out).close == (1,)


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


def test_a_lost_drafter_leaves_the_sequence_to_another_and_its_drafts_stay_valid() -> None:
    scheduler = started()
    scheduler.handle(DrafterJoined(0, "e", 1000))
    scheduler.handle(proposal(PROMPT, 10, 11))
    out = scheduler.handle(DrafterLost(0.6, "d"))
    assert out[0] == OpenDraft("e", 1, request(1, PROMPT).spec, PROMPT)
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


def test_few_blocks_preempt_the_youngest_and_every_text_is_whole() -> None:
    world = World(Scheduler(max_num_seqs=8, max_step_tokens=16), num_blocks=12)
    world.join_target()
    for sequence_id in range(1, 7):
        asked = request(sequence_id, PROMPT, policy=PolicyName.OFF, max_tokens=30)
        world.send(Admitted(0, asked))
    openings = 0
    while len(world.finished) < 6:
        assert world.step is not None
        openings += len(world.step.open)
        world.answer()
    assert openings > 6, "nothing was preempted: the pool was not small enough to test it"
    assert world.target.max_slices > 1


def test_a_perfect_drafter_makes_few_steps_and_long_prompts_are_cut_to_the_budget() -> None:
    world = World(Scheduler(max_num_seqs=4, max_step_tokens=16))
    world.join_target()
    world.drafters["d"] = PretendedDrafter(true_token)
    world.send(DrafterJoined(0, "d", 1000))
    world.send(Admitted(0, request(1, tuple(range(1, 41)), max_tokens=20)))
    steps = 0
    while not world.finished:
        assert world.step is not None
        assert sum(len(part.token_ids) for part in world.step.slices) <= 16
        for _ in range(5):
            world.draft("d")
        world.answer()
        steps += 1
    stats = world.finished[1].stats
    assert steps - stats.steps == 2, "40 tokens in chunks of 16 are two steps without a verdict"
    assert stats.accepted == stats.drafted > 0
    assert stats.steps <= 6


def tree_request(rule: Rule, *, window: int = 6, branches: int = 2) -> Request:
    asked = request(1, PROMPT, window=window, branches=branches)
    return dataclasses.replace(asked, spec=dataclasses.replace(asked.spec, rule=rule))


def started_with(asked: Request) -> Scheduler:
    scheduler = Scheduler(wait_seconds=2.0)
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    scheduler.handle(DrafterJoined(0, "d", 1000, rules=frozenset(Rule)))
    scheduler.handle(Admitted(0, asked))
    return scheduler


def tree_proposal(
    path: Sequence[int], token_ids: tuple[int, ...], parents: tuple[int, ...]
) -> Proposed:
    made = Proposal(1, len(path), hash_prefix(path), token_ids, parents=parents)
    return Proposed(0.5, "d", (made,))


def test_an_accepted_path_of_a_tree_moves_to_its_own_positions_in_the_next_slice() -> None:
    scheduler = started_with(tree_request(Rule.COUPLED))
    scheduler.handle(verdict(1, 0, 10))
    path = (*PROMPT, 10)
    # 11 and 12 under the root; 13 and 14 under 12.
    scheduler.handle(tree_proposal(path, (11, 12, 13, 14), (0, 0, 2, 2)))
    part = the_step(scheduler.handle(verdict(2, 0, 12))).slices[0]
    # The target itself chose 12, so what hangs from it stays.
    assert (part.token_ids, part.parents) == ((12, 13, 14), (0, 0))
    answer = StepDone(2, 3, (SequenceVerdict(1, 1, 15, accepted=(1,)),))
    out = scheduler.handle(answer)
    part = the_step(out).slices[0]
    assert (part.start, part.token_ids) == (6, (15,))
    assert part.kv_moves == ((6, 5),)
    assert Emit(1, 2, (14, 15), 1) in out


@pytest.mark.parametrize("accepted", [(0, 1), (1, 0), (2,), (7,)])
def test_accepted_candidates_that_are_no_path_are_refused(accepted: tuple[int, ...]) -> None:
    scheduler = started_with(tree_request(Rule.COUPLED))
    scheduler.handle(tree_proposal(PROMPT, (10, 11, 12, 13), (0, 1, 1, 3)))
    out = scheduler.handle(verdict(1, 0, 10))
    assert the_step(out).slices[0].parents == (0, 0, 2)
    with pytest.raises(ProtocolError):
        scheduler.handle(
            StepDone(2, 2, (SequenceVerdict(1, len(accepted), 15, accepted=accepted),))
        )


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION])
def test_run_ahead_takes_the_place_of_the_bonus_only_where_coins_are_tossed(rule: Rule) -> None:
    scheduler = started_with(tree_request(rule, window=2, branches=1))
    scheduler.handle(verdict(1, 0, 10))
    scheduler.handle(proposal((*PROMPT, 10), 11, 12))
    assert the_step(scheduler.handle(verdict(2, 0, 11))).slices[0].window == 1
    scheduler.handle(proposal((*PROMPT, 10, 11, 12), 13))
    out = scheduler.handle(verdict(3, 1, 13))
    part = the_step(out).slices[0]
    if rule is Rule.COUPLED:
        assert Emit(1, 2, (12, 13), 1) in out
        assert (part.start, part.token_ids) == (6, (13,))
    else:
        # 13 was drafted before the bonus was known: it is verified, not taken for granted.
        assert Emit(1, 2, (12,), 1) in out
        assert (part.start, part.token_ids) == (5, (12, 13))


def test_windows_of_independent_paths_are_cut_by_depth_alone() -> None:
    scheduler = started_with(tree_request(Rule.KSEQ, window=4, branches=2))
    path = (*PROMPT, 10)
    scheduler.handle(verdict(1, 0, 10))
    # Two paths, equal in their first token. Four candidates would fit, three levels need not.
    scheduler.handle(tree_proposal(path, (11, 12, 13, 14, 15), (0, 1, 1, 2, 3)))
    part = the_step(scheduler.handle(verdict(2, 0, 11))).slices[0]
    assert part.token_ids == (11, 12, 13, 14, 15)
    assert part.parents == (0, 0, 1, 2)


def test_three_malformed_proposals_make_a_drafter_suspect() -> None:
    scheduler = started()
    for _ in range(2):
        assert scheduler.handle(MalformedProposal(0.5, "d")) == []
    assert scheduler.handle(MalformedProposal(0.5, "d")) == [Suspect("d")]
    out = scheduler.handle(verdict(1, 0, 10))
    assert [type(each) for each in out] == [RunStep, Emit], "it goes on plainly"
    assert scheduler.handle(DrafterLost(1, "d")) == []


def test_a_drafter_that_does_not_fit_the_rule_is_not_asked() -> None:
    scheduler = Scheduler()
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    scheduler.handle(DrafterJoined(0, "n", 1000, kind="ngram", rules=frozenset({Rule.COUPLED})))
    out = scheduler.handle(Admitted(0, tree_request(Rule.REJECTION, branches=1)))
    assert [type(each) for each in out] == [RunStep]


def test_stopping_by_cost_is_told_what_steps_cost_and_bring() -> None:
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

    scheduler = started_with(dataclasses.replace(request(1, PROMPT), stopping=Stopping.COST))
    scheduler.handle(verdict(1, 0, 10, now=1.0))
    answers = [
        StepDone(1.01 + i / 100, 2 + i, (SequenceVerdict(1, 0, 11),), 0.01) for i in range(3)
    ]
    out = [each for answer in answers for each in scheduler.handle(answer)]
    assert [each.tokens_per_ms for each in out if isinstance(each, Grant)][-1] > 0


def test_a_tree_is_no_answer_to_a_request_for_a_chain() -> None:
    scheduler = started()
    scheduler.handle(tree_proposal(PROMPT, (10, 11, 12), (0, 0, 1)))
    assert scheduler.totals.dropped_proposals == 1
    assert the_step(scheduler.handle(verdict(1, 0, 10))).slices[0].window == 0
