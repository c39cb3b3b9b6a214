"""A thousand random schedules (schedules.py) for every policy give the text of plain decoding."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.decoding.policies import lockstep, pearl
from cluster.decoding.policy import DraftView, Wait
from cluster.decoding.sequence import Sequence
from cluster.decoding.state import DecodingState, Deferred
from cluster.decoding.token_tree import TokenTree
from tests.cluster.decoding.schedules import Schedule

pytestmark = pytest.mark.long


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=20, max_size=160))
def test_text_and_invariants_under_random_schedules(tape: bytes) -> None:
    Schedule.run(tape)


def test_the_fuzzer_notices_a_branch_that_was_picked_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: the branch of another outcome is taken for that of the verdict."""
    right_commit = TokenTree.commit

    def careless_commit(
        tree: TokenTree, accepted: tuple[int, ...], token_id: int | None
    ) -> tuple[int, ...]:
        leaf = tree._pinned[accepted[-1]] if accepted else tree.root
        if len(leaf.children) > 1:
            token_id = leaf.children[-1].token_id
        return right_commit(tree, accepted, token_id)

    monkeypatch.setattr(TokenTree, "commit", careless_commit)
    with pytest.raises(AssertionError):
        _run_many(300)


def test_the_fuzzer_notices_a_wait_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a policy waits for a silent drafter without a time limit."""

    def for_ever(view: DraftView, full: int, now: float, wait_seconds: float) -> int | Wait:
        return min(full, view.num_candidates) if view.num_candidates >= full else Wait()

    monkeypatch.setattr(lockstep, "await_candidates", for_ever)
    monkeypatch.setattr(pearl, "await_candidates", for_ever)
    with pytest.raises(AssertionError, match="nothing to wait for"):
        _run_many(100)


def test_the_fuzzer_notices_a_sequence_that_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the caller reads again, but the sequence is not resumed."""
    monkeypatch.setattr(DecodingState, "resume", lambda state, now, sequence: None)
    with pytest.raises(AssertionError, match="nothing to wait for"):
        _run_many(100)


def test_the_fuzzer_notices_a_pause_that_keeps_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a paused sequence stays in the batch."""

    def careless_pause(state: DecodingState, sequence: Sequence, out: Deferred) -> None:
        sequence.paused = True

    monkeypatch.setattr(DecodingState, "pause", careless_pause)
    with pytest.raises(AssertionError, match="a paused sequence is in a new step"):
        _run_many(100)


def test_schedules_reach_what_they_are_for() -> None:
    """Every trouble of schedules.py happens, and at moments where it can do harm."""
    seen = _run_many(300)
    assert len(seen) == 17, seen
    assert min(seen.values()) >= 5, seen


def _run_many(count: int) -> Counter[str]:
    return Schedule.run_many(count, num_bytes=120, seed=3)
