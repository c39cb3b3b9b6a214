"""The controller of `auto` may choose anything at any time: the text stays plain decoding's.

Uses the schedules of schedules.py. At random moments, also during a step, each sequence changes its
policy, its window, whether trees are verified, or whether several groups verify it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.decoding.auto.choices import OFF, choice_of, drafting_choices
from cluster.decoding.policies.replicas import REPLICAS
from cluster.decoding.sequence import Replica, Sequence
from cluster.decoding.token_tree import TokenTree
from tests.cluster.decoding.schedules import FewThatGoWell, Schedule

pytestmark = pytest.mark.long

CHOICES = (OFF, *drafting_choices())


class Steered(Schedule):
    """All requests have the policy `auto`, and the tape chooses in the controller's place."""

    policies = ("auto",)
    tape_length = 150

    def act(self) -> None:
        for sequence in self.world.scheduler._state.running:
            if self.tape.choose(3) == 0:
                self.steer(sequence)
        super().act()

    def steer(self, sequence: Sequence) -> None:
        """Make another choice for this sequence, among those that it may have."""
        pilot, choice = sequence.pilot, CHOICES[self.tape.choose(len(CHOICES))]
        assert pilot is not None
        if choice is OFF:
            pilot.rest()
        elif pilot.allows(choice):
            pilot.follow(choice, 1 + self.tape.choose(pilot.limit))
        was_tree = sequence.tree.num_pinned > 0 and pilot.choice.is_tree
        self.seen["a tree in a step"] += was_tree
        self.seen[pilot.choice.name] += 1
        self.seen["by several groups, then by one"] += bool(
            any(one.kv.in_flight for one in sequence.replicas)
            and sequence.policy.replicates
            and not pilot.policy.replicates
        )
        sequence.steer(pilot)


class OnTwoGroups(FewThatGoWell, Steered):
    """The windows of a sequence are verified by several groups and by one, in turn."""

    answered_one_in = 2
    tape_length = 500

    def steer(self, sequence: Sequence) -> None:
        """Often change to or from `replicas`."""
        pilot = sequence.pilot
        assert pilot is not None
        if self.tape.choose(2) and pilot.allows(choice_of(REPLICAS)):
            pilot.follow(choice_of(REPLICAS), pilot.window)
            sequence.steer(pilot)
        else:
            super().steer(sequence)
        self.seen["a verdict of several"] += sequence.policy.replicates and bool(sequence.replicas)


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=20, max_size=200))
def test_text_and_invariants_whatever_is_chosen(tape: bytes) -> None:
    Steered.run(tape)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=60, max_size=500))
def test_text_and_invariants_while_several_groups_verify_or_one_does(tape: bytes) -> None:
    OnTwoGroups.run(tape)


def test_schedules_change_between_several_groups_and_one() -> None:
    seen = _run_many(60, OnTwoGroups)
    assert seen["by several groups, then by one"] >= 10, seen
    assert seen["a verdict of several"] >= 20, seen


def test_the_fuzzer_notices_that_a_replica_lets_go_of_what_its_lead_verifies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: a replica that ends removes its lead's candidates from their step."""
    monkeypatch.setattr(Replica, "forget_kv", Sequence.forget_kv)
    with pytest.raises((AssertionError, IndexError)):
        _run_many(150, OnTwoGroups)


def test_schedules_reach_every_choice() -> None:
    seen = _run_many(200)
    assert all(seen[choice.name] >= 5 for choice in CHOICES), seen
    assert seen["a tree in a step"] >= 5


def test_the_fuzzer_notices_a_tree_that_is_committed_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: the wrong one of two siblings is committed."""
    right_commit = TokenTree.commit

    def careless_commit(
        tree: TokenTree, accepted: tuple[int, ...], token_id: int | None
    ) -> tuple[int, ...]:
        if accepted:
            above = tree._pinned[accepted[-1]].parent
            beside = [i for i, node in enumerate(tree._pinned) if node.parent is above]
            accepted = (*accepted[:-1], beside[-1])
        return right_commit(tree, accepted, token_id)

    monkeypatch.setattr(TokenTree, "commit", careless_commit)
    with pytest.raises(AssertionError):
        _run_many(300)


def _run_many(count: int, kind: type[Steered] = Steered) -> Counter[str]:
    return kind.run_many(count, num_bytes=kind.tape_length, seed=3)
