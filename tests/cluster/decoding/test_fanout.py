"""Policy fanout on short scripts: the driver holds branches and picks one at the verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.decoding.events import Admitted, DrafterJoined, TargetJoined
from cluster.decoding.instructions import Instruction, SendGrant
from cluster.decoding.scheduler import Scheduler
from cluster.driver.fitting import check_policy_fits
from paceline.errors import InvalidRequestError
from tests.cluster.decoding.scripts import (
    PROMPT,
    proposal,
    started,
    the_step,
    tree_proposal,
    verdict,
)
from tests.cluster.decoding.true_text import request


def fanned_out(**options: object) -> Scheduler:
    """The drafter has sent 10, 11, 12, 13, 14 as the chain, and 10, 21, 22, 23 as a branch."""
    scheduler = started("fanout", window=2, **options)
    scheduler.handle(tree_proposal(PROMPT, (10, 11, 21, 12, 22), (0, 1, 1, 2, 3)))
    scheduler.handle(tree_proposal((*PROMPT, 10), (11, 12, 13, 14), (0, 1, 2, 3)))
    scheduler.handle(proposal((*PROMPT, 10, 21, 22), 23))
    return scheduler


def test_grants_say_how_many_branches_and_make_room_for_them() -> None:
    scheduler = started("fanout", window=2)
    out = scheduler.handle(verdict(1, 0, 10))
    (grant,) = [one.grant for one in out if isinstance(one, SendGrant)]
    assert (grant.branches, grant.fan_out, grant.nodes) == (1, 5, 5 + 5 * 3)
    assert grant.until_position == len(PROMPT) + 1 + 5


def test_a_step_verifies_the_chain_alone_and_the_verdict_picks_the_branch() -> None:
    scheduler = fanned_out()
    out = scheduler.handle(verdict(1, 0, 10))
    assert the_step(out).slices[0].token_ids == (10, 11, 12)
    assert the_step(out).slices[0].parents == ()
    out = scheduler.handle(verdict(2, 0, 21))
    assert the_step(out).slices[0].token_ids == (21, 22, 23), "the branch, at once"
    assert scheduler.totals.counts.branch_hits == 1


def test_a_miss_is_an_ordinary_chain() -> None:
    scheduler = fanned_out()
    scheduler.handle(verdict(1, 0, 10))
    out = scheduler.handle(verdict(2, 1, 40))
    assert the_step(out).slices[0].token_ids == (40,)
    scheduler.handle(proposal((*PROMPT, 10, 21, 22, 23), 24))
    assert scheduler.totals.dropped_proposals == 1, "of a branch that came to nothing"
    scheduler.handle(proposal((*PROMPT, 10, 11, 40), 41, 42))
    assert the_step(scheduler.handle(verdict(3, 0, 41))).slices[0].token_ids == (41, 42)


def test_a_branch_that_comes_after_its_verdict_is_found_by_content() -> None:
    scheduler = started("fanout", window=2)
    scheduler.handle(proposal(PROMPT, 10, 11))
    scheduler.handle(verdict(1, 0, 10))
    scheduler.handle(verdict(2, 0, 21))
    scheduler.handle(tree_proposal((*PROMPT, 10), (21, 22, 23), (0, 1, 2)))
    assert the_step(scheduler.handle(verdict(3, 0, 22))).slices[0].token_ids == (22, 23)


def test_with_branches_of_its_own_a_window_is_a_tree() -> None:
    scheduler = fanned_out(branches=2)
    out: list[Instruction] = scheduler.handle(verdict(1, 0, 10))
    assert the_step(out).slices[0].token_ids == (10, 11, 12)
    scheduler = started("fanout", window=4, branches=2)
    scheduler.handle(tree_proposal(PROMPT, (10, 11, 21, 12, 22), (0, 1, 1, 2, 3)))
    out = scheduler.handle(verdict(1, 0, 10))
    assert the_step(out).slices[0].token_ids == (10, 11, 12, 21, 22)
    assert the_step(out).slices[0].parents == (0, 1, 0, 3)
    accepted = verdict(2, 2, 23)
    path = replace(accepted.verdicts[0], accepted=(2, 3))
    out = scheduler.handle(replace(accepted, verdicts=(path,)))
    assert the_step(out).slices[0].token_ids == (23,)


@pytest.mark.parametrize("rule", ["rejection", "kseq", "recursive", "mcsd"])
def test_rules_whose_outcomes_cannot_be_foreseen_are_refused(rule: str) -> None:
    with pytest.raises(InvalidRequestError, match="fanout"):
        check_policy_fits("fanout", rule, 1)
    check_policy_fits("fanout", "coupled", 2)


def test_a_slow_drafter_gets_fewer_branches() -> None:
    scheduler = started("fanout", window=8)
    scheduler.handle(replace(proposal(PROMPT, 10), pass_seconds=0.004))
    scheduler.handle(verdict(1, 0, 10))
    out = scheduler.handle(replace(verdict(2, 0, 11), step_seconds=0.010))
    assert [one.grant.fan_out for one in out if isinstance(one, SendGrant)] == [17]
    out = scheduler.handle(verdict(3, 0, 12))
    assert [one.grant.fan_out for one in out if isinstance(one, SendGrant)] == [5], (
        "2.5 passes a step"
    )


@pytest.mark.parametrize(("crowd", "branches"), [(1, 17), (4, 15), (8, 7), (32, 1), (64, 0)])
def test_the_more_sequences_a_drafter_has_the_fewer_branches_each_gets(
    crowd: int, branches: int
) -> None:
    scheduler = Scheduler()
    scheduler.handle(DrafterJoined(0, "d", 1000))
    for number in range(1, crowd + 1):
        asked = request(number, PROMPT, policy="fanout", window=8)
        scheduler.handle(Admitted(0, asked))
    out = scheduler.handle(TargetJoined(0, 50, 1000, 4, 1024))
    # The last one gets its grant when all of them are there.
    (grant,) = [one for one in out if isinstance(one, SendGrant) and one.sequence_id == crowd]
    assert grant.grant.fan_out == branches
