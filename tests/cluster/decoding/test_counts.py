"""What is counted, on short scripts whose counts are easy to see."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.decoding.events import Proposed, StepDone
from cluster.decoding.instructions import Finish, Instruction
from cluster.decoding.scheduler import Scheduler
from cluster.decoding.timings import ideal_tokens_per_step
from tests.cluster.decoding.scripts import (
    PROMPT,
    proposal,
    started,
    started_with,
    tree_proposal,
    tree_request,
    verdict,
)
from tests.cluster.decoding.true_text import END_TOKEN


def timed(event: Proposed | StepDone, now: float, seconds: float) -> Proposed | StepDone:
    """The event at `now`, after a pass or step of `seconds`."""
    if isinstance(event, StepDone):
        return dataclasses.replace(event, now=now, step_seconds=seconds)
    return dataclasses.replace(event, now=now, pass_seconds=seconds)


def finish_of(instructions: list[Instruction]) -> Finish:
    (finish,) = (one for one in instructions if isinstance(one, Finish))
    return finish


def chained() -> tuple[Scheduler, Finish]:
    """Four verdicts: 10; 11 12 and 13 foreseen; nothing accepted; the end token accepted."""
    scheduler = started(max_tokens=9)
    scheduler.handle(timed(proposal(PROMPT, 10, 11, 12), 0.5, 0.1))
    scheduler.handle(timed(verdict(1, 0, 10), 1.0, 0.9))
    scheduler.handle(timed(proposal((*PROMPT, 10, 11, 12), 13, 14), 1.5, 0.2))
    scheduler.handle(timed(verdict(2, 2, 13), 2.0, 0.9))
    scheduler.handle(timed(proposal((*PROMPT, 10, 11, 12, 13, 14), 15), 2.5, 0.2))
    # The window is 14. It is refused, and 15 was for nothing.
    scheduler.handle(timed(verdict(3, 0, 20), 3.0, 0.9))
    scheduler.handle(timed(proposal((*PROMPT, 10, 11, 12, 13, 20), END_TOKEN), 3.5, 0.2))
    # The step in flight is plain; what follows is the end token, which had been foreseen.
    out = scheduler.handle(timed(verdict(4, 0, END_TOKEN), 4.0, 0.9))
    return scheduler, finish_of(out)


def test_acceptance_by_position_and_the_use_of_draft_work() -> None:
    scheduler, finish = chained()
    stats = finish.stats
    assert (stats.steps, finish.output_tokens) == (4, 6)
    assert (stats.drafted, stats.accepted) == (3, 2)
    drafting = stats.speculation
    assert drafting.drafted_at == (2, 1)
    assert drafting.tried_at == (2, 1)
    assert drafting.accepted_at == (1, 1)
    assert drafting.acceptance == 2 / 3
    assert drafting.proposed == 7
    # Accepted: 11, 12. Foreseen: 10, 13, and the end.
    assert drafting.used == 5
    assert drafting.wasted_steps == 1
    # 20 came where 14 had been held, and no branch held it.
    assert (drafting.diverged, drafting.branch_hits, drafting.hit_rate) == (1, 0, 0.0)
    assert scheduler.totals.counts.speculation() == dataclasses.replace(
        drafting, target_idle=None, drafter_idle=None, efficiency=None
    )
    assert (scheduler.totals.counts.verdicts, scheduler.totals.steps) == (4, 4)


def test_idle_shares_and_efficiency_are_those_from_the_first_token_to_the_last() -> None:
    scheduler, finish = chained()
    drafting = finish.stats.speculation
    # From 1.0 to 4.0: three steps of 0.9 s and three passes of 0.2 s; five tokens.
    assert drafting.target_idle == pytest.approx(0.1)
    assert drafting.drafter_idle == pytest.approx(0.8)
    ideal = ideal_tokens_per_step(2 / 3, step_seconds=0.9, draft_seconds=0.2)
    assert ideal == pytest.approx(3.0), "bound by acceptance, not by five passes a step"
    assert drafting.efficiency == pytest.approx(5 * 0.9 / 3.0 / ideal)
    assert scheduler.utilization.at_work_seconds == pytest.approx(4.0)
    shares = scheduler.speculation()
    assert shares.target_idle == pytest.approx(1 - 3.6 / 4)
    assert shares.drafter_idle == pytest.approx(1 - 0.7 / 4)
    assert shares.efficiency == drafting.efficiency


def test_the_ideal_is_bound_by_the_pace_of_the_drafter() -> None:
    assert ideal_tokens_per_step(0.9, step_seconds=1.0, draft_seconds=0.5) == 3.0
    assert ideal_tokens_per_step(0.5, step_seconds=1.0, draft_seconds=0.0) == 2.0
    assert ideal_tokens_per_step(0.0, step_seconds=1.0, draft_seconds=0.5) == 1.0


def test_time_without_work_counts_for_nobody() -> None:
    scheduler, _ = chained()
    before = scheduler.speculation()
    scheduler.handle(Proposed(100.0, "d", ()))
    assert scheduler.speculation() == before


def test_a_tree_counts_its_depth_and_a_branch_that_was_hit() -> None:
    scheduler = started_with(tree_request("coupled"))
    scheduler.handle(tree_proposal(PROMPT, (10, 11), (0, 0)))
    scheduler.handle(verdict(1, 0, 11))
    counts = scheduler.totals.counts
    # The first candidate was 10; the other branch held 11, and nothing below it.
    assert (counts.diverged, counts.branch_hits, counts.used) == (1, 1, 1)
    path = (*PROMPT, 11)
    scheduler.handle(tree_proposal(path, (20, 21, 22), (0, 0, 1)))
    scheduler.handle(verdict(2, 0, 20))
    scheduler.handle(verdict(3, 0, 30))
    drafting = counts.speculation()
    assert counts.drafted == 1, "22 alone was left of the tree, and verified"
    assert (drafting.drafted_at, drafting.wasted_steps) == ((1,), 1)
    assert (drafting.diverged, drafting.branch_hits) == (2, 1)


def test_a_token_told_again_is_proposed_once_and_one_too_late_is_no_use() -> None:
    scheduler = started()
    scheduler.handle(proposal(PROMPT, 10, 11))
    scheduler.handle(proposal(PROMPT, 10, 11, 12))
    counts = scheduler.totals.counts
    assert counts.proposed == 3
    scheduler.handle(verdict(1, 0, 40))
    scheduler.handle(proposal((*PROMPT, 10, 11, 12), 13))
    assert (counts.proposed, counts.used) == (4, 0)


def test_what_lies_beyond_the_end_is_neither_accepted_nor_tried() -> None:
    scheduler = started(max_tokens=9)
    scheduler.handle(proposal(PROMPT, 10, 11, END_TOKEN, 13))
    scheduler.handle(verdict(1, 0, 10))
    finish = finish_of(scheduler.handle(verdict(2, 3, 14)))
    assert finish.output_tokens == 3
    assert finish.stats.speculation.tried_at == (1, 1)
    assert finish.stats.speculation.accepted_at == (1, 1)
