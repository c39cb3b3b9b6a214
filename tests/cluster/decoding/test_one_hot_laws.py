"""The one-hot rule keeps the law with fan-out and with merged drafters: exactly.

Candidates that no coin drew: n-grams, recycled rows, branches beside the likeliest chain, alone and
side by side in one tree, through the scheduler. All coins are summed over; see law_world.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.decoding.token_tree import TokenTree
from tests.cluster.decoding.law_breaks import bonus_where_it_agrees
from tests.cluster.decoding.law_cases import CHAIN, FANOUT, LOCKSTEP, Case
from tests.cluster.decoding.law_faults import Fault, TargetFault
from tests.cluster.decoding.law_world import Timing
from workers.verification.rules.one_hot import OneHotNode

pytestmark = pytest.mark.long

PAIRS = (("ngram", "recycling"), ("recycling", "branching"))
THREE = ("ngram", "recycling", "branching")


def _alone(kind: str, branches: int, timing: Timing, fault: Fault | None = None) -> Case:
    return Case("one-hot", FANOUT, branches, 3, timing, 3, fault, 4, (kind,))


FAN_OUT = _alone("branching", 1, Timing(2))
FAN_OUT_CASES = [
    _alone(kind, branches, timing)
    for kind in THREE
    for branches in (1, 2)
    for timing in (Timing(1), Timing(2, 1), Timing(3))
]
FAN_OUT_CASES += [
    _alone("branching", branches, Timing(2), fault)
    for branches in (1, 2)
    for fault in (TargetFault(2), TargetFault(3, away=1), TargetFault(2, away=1, drafter_too=True))
]

MERGED = Case("one-hot", FANOUT, 1, 3, Timing(2), 3, None, 4, THREE, merge=True)
MERGED_CASES = [
    Case("one-hot", policy, branches, 3, timing, 3, None, 4, kinds, merge=True)
    for kinds in (*PAIRS, THREE)
    for policy, branches, timing in (
        (CHAIN, 1, Timing(2)),
        (CHAIN, 2, Timing(2, 1)),
        (LOCKSTEP, 1, Timing(0)),
        (FANOUT, 1, Timing(3)),
        (FANOUT, 2, Timing(1)),
    )
]
MERGED_CASES += [
    replace(MERGED, fault=fault)
    for fault in (TargetFault(2, away=1), TargetFault(3, verified=True))
]


@pytest.mark.parametrize("case", FAN_OUT_CASES, ids=str)
def test_the_law_is_the_targets_with_branches(case: Case) -> None:
    case.check_exact()


@pytest.mark.parametrize("case", MERGED_CASES, ids=str)
def test_the_law_is_the_targets_where_drafters_are_merged(case: Case) -> None:
    case.check_exact()


def test_a_branch_that_no_step_verified_is_the_next_window() -> None:
    """So the test above is about what it says: the chain was refused, and a branch was right."""
    found = FAN_OUT.serve()
    assert all(not part.parents for part in found.windows), "only the chain is verified"
    assert found.branch_hits > 0


def test_candidates_of_several_drafters_stand_side_by_side() -> None:
    widths = {part.parents.count(0) for part in MERGED.serve().windows}
    assert max(widths) == 3, "though each of them drafts a chain"


# Negative controls: each is wrong by more than rounding.


def _refused_may_come_again(patch: pytest.MonkeyPatch) -> None:
    """After a refusal the target's whole distribution is left."""
    patch.setattr(OneHotNode, "refused", lambda node, token_id: node)


def _likeliest_branch(patch: pytest.MonkeyPatch) -> None:
    """Where the chain is refused and a branch is held there, the branch is gone on with."""
    commit: Any = TokenTree.commit

    def with_branch(
        tree: TokenTree, accepted: tuple[int, ...], token_id: int | None
    ) -> tuple[int, ...]:
        leaf = tree._pinned[accepted[-1]] if accepted else tree.root
        if len(leaf.children) > 1 and leaf.children[0].token_id != token_id is not None:
            token_id = leaf.children[1].token_id
        committed: tuple[int, ...] = commit(tree, accepted, token_id)
        return committed

    patch.setattr(TokenTree, "commit", with_branch)


@pytest.mark.parametrize(
    ("case", "broken"),
    [
        (FAN_OUT, bonus_where_it_agrees),
        (FAN_OUT, _refused_may_come_again),
        (FAN_OUT, _likeliest_branch),
        (MERGED, _refused_may_come_again),
        (MERGED, _likeliest_branch),
    ],
)
def test_what_is_broken_is_noticed(
    case: Case, broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    case.check_noticed()
