"""Random schedules of the policy `replicas`: groups answer late, out of order, or never.

Several groups verify one or two sequences. Most drafts are right, so that windows follow each
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.decoding import step_answers
from cluster.decoding.instructions import Slice
from cluster.decoding.replicas import Told, told_by
from cluster.decoding.token_tree import TokenTree
from tests.cluster.decoding.schedules import FewThatGoWell, Tape

pytestmark = pytest.mark.long


class ReplicasSchedule(FewThatGoWell):
    """Few requests at a time; several groups verify each."""

    policies = ("replicas",)

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        for _ in range(40):
            self.go_well()


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=60, max_size=400))
def test_text_and_invariants_though_groups_answer_late_or_never(tape: bytes) -> None:
    ReplicasSchedule.run(tape)


def _run_many(count: int) -> None:
    ReplicasSchedule.run_many(count, num_bytes=500, seed=5)


def test_schedules_reach_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some verdicts repeat others in part or wholly, with fed tokens that others verified."""
    seen: Counter[str] = Counter()

    def watched(tree: TokenTree, part: Slice, num_accepted: int, token_id: int) -> Told:
        told = told_by(tree, part, num_accepted, token_id)
        fed = len(part.token_ids) - part.window
        known = tree.num_committed - part.start - fed
        seen["in part"] += known > 0 and bool(told.token_ids)
        seen["wholly"] += not told.token_ids
        seen["caught up"] += fed > 1 and part.window > 0
        seen["accepted"] += told.accepted > 0 and known > 0
        return told

    monkeypatch.setattr(step_answers, "told_by", watched)
    _run_many(150)
    assert min(seen[key] for key in ("in part", "wholly", "caught up", "accepted")) > 50, seen


def _all_is_new(tree: TokenTree, part: Slice, num_accepted: int, token_id: int) -> Told:
    """Broken: treats every verdict as new."""
    first = len(part.token_ids) - part.window
    told = (*part.token_ids[first : first + num_accepted], token_id)
    length = part.start + first + num_accepted
    return Told(told, length, part.window, num_accepted)


def _kv_of_all_fed(tree: TokenTree, part: Slice, num_accepted: int, token_id: int) -> Told:
    """Broken: takes all KV that a group was fed for right, whatever was committed meanwhile."""
    told = told_by(tree, part, num_accepted, token_id)
    length = min(part.start + len(part.token_ids), tree.num_committed + len(told.token_ids) - 1)
    return Told(told.token_ids, length, told.window, told.accepted)


@pytest.mark.parametrize("broken", [_all_is_new, _kv_of_all_fed])
def test_the_fuzzer_notices(broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    monkeypatch.setattr(step_answers, "told_by", broken)
    with pytest.raises(AssertionError):
        _run_many(150)


def test_verdicts_of_several_groups_are_told_once() -> None:
    """A tree commits two overlapping verdicts once, in either order."""

    def committed(order: Iterable[int]) -> list[int]:
        tree = TokenTree((1, 2))
        verdicts = {
            0: (Slice(1, 1, (2, 10, 11), 2, True, ()), 2, 12),
            1: (Slice(1, 1, (2, 10, 11, 12, 13, 14), 5, True, ()), 4, 99),
        }
        for number in order:
            told = told_by(tree, *verdicts[number])
            tree.advance(told.token_ids)
        return tree.token_ids

    assert committed((0, 1)) == committed((1, 0)) == [1, 2, 10, 11, 12, 13, 99]


def test_a_verdict_on_another_text_than_what_is_committed_brings_nothing() -> None:
    """Exact targets never disagree. Where kernels are not exact, the first verdict stands."""
    tree = TokenTree((1, 2))
    tree.advance((10, 20))
    part = Slice(1, 0, (1, 2, 10, 11, 12), 3, True, ())
    told = told_by(tree, part, 3, 13)
    assert (told.token_ids, told.kv_length, told.accepted, told.window) == ((), 3, 0, 3)
