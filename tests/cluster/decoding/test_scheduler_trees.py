"""Windows that are trees, and rules that toss coins."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cluster.decoding.events import (
    DrafterJoined,
    DrafterLost,
    Proposal,
    Proposed,
    SequenceVerdict,
    StepDone,
    TargetLost,
)
from cluster.decoding.instructions import (
    Emit,
)
from paceline.errors import ProtocolError
from paceline.prefix_hash import hash_prefix
from tests.cluster.decoding.scripts import (
    PROMPT,
    proposal,
    started,
    started_with,
    the_step,
    tree_proposal,
    tree_request,
    verdict,
)
from workers.verification.candidates import SparseProbs
from workers.verification.rule import RULES


def test_an_accepted_path_of_a_tree_moves_to_its_own_positions_in_the_next_slice() -> None:
    scheduler = started_with(tree_request("coupled"))
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


@pytest.mark.parametrize(
    ("accepted", "refused"), [((), (13, 16)), ((0,), (16,)), ((1,), ()), ((0, 2), ())]
)
@pytest.mark.parametrize("asked", [True, False])
def test_a_caller_who_asks_is_told_what_its_last_token_is_in_place_of(
    accepted: tuple[int, ...], refused: tuple[int, ...], asked: bool
) -> None:
    request = dataclasses.replace(tree_request("coupled"), tells_refused=asked)
    scheduler = started_with(request)
    scheduler.handle(verdict(1, 0, 10))
    # 11 and 12 under the root; 13 and 14 under 12; 16 under 13.
    scheduler.handle(tree_proposal((*PROMPT, 10), (11, 12, 13, 14, 16), (0, 0, 2, 2, 3)))
    part = the_step(scheduler.handle(verdict(2, 0, 12))).slices[0]
    assert (part.token_ids, part.parents) == ((12, 13, 14, 16), (0, 0, 1))
    out = scheduler.handle(
        StepDone(2, 3, (SequenceVerdict(1, len(accepted), 20, accepted=accepted),))
    )
    tokens = (*(part.token_ids[1 + index] for index in accepted), 20)
    told = refused if asked else ()
    assert Emit(1, 2, tokens, len(accepted), refused=told) in out


@pytest.mark.parametrize("accepted", [(0, 1), (1, 0), (2,), (7,)])
def test_accepted_candidates_that_are_no_path_are_refused(accepted: tuple[int, ...]) -> None:
    scheduler = started_with(tree_request("coupled"))
    scheduler.handle(tree_proposal(PROMPT, (10, 11, 12, 13), (0, 1, 1, 3)))
    out = scheduler.handle(verdict(1, 0, 10))
    assert the_step(out).slices[0].parents == (0, 0, 2)
    with pytest.raises(ProtocolError):
        scheduler.handle(
            StepDone(2, 2, (SequenceVerdict(1, len(accepted), 15, accepted=accepted),))
        )


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_run_ahead_takes_the_place_of_the_bonus_only_where_coins_are_tossed(rule: str) -> None:
    scheduler = started_with(tree_request(rule, window=2, branches=1))
    scheduler.handle(verdict(1, 0, 10))
    scheduler.handle(proposal((*PROMPT, 10), 11, 12))
    assert the_step(scheduler.handle(verdict(2, 0, 11))).slices[0].window == 1
    scheduler.handle(proposal((*PROMPT, 10, 11, 12), 13))
    out = scheduler.handle(verdict(3, 1, 13))
    part = the_step(out).slices[0]
    if rule == "coupled":
        assert Emit(1, 2, (12, 13), 1) in out
        assert (part.start, part.token_ids) == (6, (13,))
    else:
        # 13 was drafted before the bonus was known: it is verified, not taken for granted.
        assert Emit(1, 2, (12,), 1) in out
        assert (part.start, part.token_ids) == (5, (12, 13))


def test_windows_of_independent_paths_are_cut_by_depth_alone() -> None:
    scheduler = started_with(tree_request("kseq", window=4, branches=2))
    path = (*PROMPT, 10)
    scheduler.handle(verdict(1, 0, 10))
    # Two paths, equal in their first token. Four candidates would fit, three levels need not.
    scheduler.handle(tree_proposal(path, (11, 12, 13, 14, 15), (0, 1, 1, 2, 3)))
    part = the_step(scheduler.handle(verdict(2, 0, 11))).slices[0]
    assert part.token_ids == (11, 12, 13, 14, 15)
    assert part.parents == (0, 0, 1, 2)


def test_a_tree_is_no_answer_to_a_request_for_a_chain() -> None:
    scheduler = started()
    scheduler.handle(tree_proposal(PROMPT, (10, 11, 12), (0, 0, 1)))
    assert scheduler.totals.dropped_proposals == 1
    assert the_step(scheduler.handle(verdict(1, 0, 10))).slices[0].window == 0


@pytest.mark.parametrize("rule", ["rejection", "kseq", "recursive", "mcsd"])
def test_candidates_come_with_the_probabilities_of_the_drafter_that_drew_them(rule: str) -> None:
    """This holds even if a lost drafter had drafted after the same token."""
    scheduler = started_with(tree_request(rule, window=2, branches=1))
    path = (*PROMPT, 10)
    scheduler.handle(verdict(1, 0, 10))
    pairs = {
        name: SparseProbs(np.array([11, 12]), np.array(probs, dtype=np.float32))
        for name, probs in (("d", (0.25, 0.75)), ("e", (0.5, 0.5)))
    }

    def drafted(name: str, token_id: int) -> Proposed:
        made = Proposal(1, 4, hash_prefix(path), (token_id,), distributions={0: pairs[name]})
        return Proposed(0.5, name, (made,))

    scheduler.handle(drafted("d", 12))
    scheduler.handle(DrafterJoined(0.6, "e", 1000, rules=frozenset(RULES)))
    scheduler.handle(DrafterLost(0.7, "d"))
    scheduler.handle(drafted("e", 11))
    sequence = scheduler._state.find(1)
    assert sequence is not None
    window = sequence.tree.pin(2)
    assert (window.token_ids, window.distributions) == ((11,), {0: pairs["e"]})


def test_draws_of_two_drafters_are_not_left_side_by_side() -> None:
    """A drafter is lost while its draws are verified, and then the target, before the verdict."""
    asked = tree_request("recursive")
    for target_lost in (False, True):
        scheduler = started_with(asked)
        path = (*PROMPT, 10)
        scheduler.handle(verdict(1, 0, 10))
        scheduler.handle(tree_proposal(path, (11, 12, 13), (0, 0, 1)))
        part = the_step(scheduler.handle(verdict(2, 0, 11))).slices[0]
        assert part.token_ids == (11, 13)
        scheduler.handle(DrafterJoined(0.6, "e", 1000, rules=frozenset(RULES)))
        scheduler.handle(DrafterLost(0.7, "d"))
        made = Proposal(1, 5, hash_prefix((*path, 11)), (14, 15), parents=(0, 0))
        scheduler.handle(Proposed(0.8, "e", (made,)))
        sequence = scheduler._state.find(1)
        assert sequence is not None
        assert sequence.tree.num_candidates == 2
        if target_lost:
            scheduler.handle(TargetLost(0.9))
            assert sequence.tree.pin(4).token_ids == (14, 15)
        else:
            scheduler.handle(verdict(3, 0, 14))
            assert sequence.tree.root.token_id == 14
        scheduler.check_integrity()
