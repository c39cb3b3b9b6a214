"""The view of a sequence that policies get (policy.py). Its values are computed on demand."""

from __future__ import annotations

from cluster.decoding.policy import DraftView
from cluster.decoding.replicas import num_verifying
from cluster.decoding.sequence import Replica, Sequence
from workers.verification.rule import rule_named


def view_of(sequence: Sequence) -> DraftView:
    """The view of a sequence. A replica shows what its lead shows."""
    return _View(sequence.lead if isinstance(sequence, Replica) else sequence)


class _View:
    """A DraftView of the sequence's present state."""

    __slots__ = ("_ahead", "_sequence")

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        # Candidates that some group is verifying, where several may; None: no group is.
        self._ahead: int | None = None
        if sequence.policy.replicates:
            self._ahead = num_verifying(sequence.tree, sequence.slices_in_flight)

    @property
    def num_candidates(self) -> int:
        limit = self._sequence.window
        if self._ahead is not None:
            limit += self._ahead + 1
        return self._sequence.tree.num_verifiable(limit)

    @property
    def in_flight(self) -> int:
        if self._sequence.policy.replicates:
            return self._ahead or 0
        return self._sequence.tree.num_pinned

    @property
    def kept(self) -> int:
        return self._sequence.kept

    @property
    def window(self) -> int:
        return self._sequence.window

    @property
    def is_tree(self) -> bool:
        sequence = self._sequence
        if sequence.pilot is not None and sequence.pilot.choice.is_tree:
            return True
        return sequence.request.branches > 1 or sequence.request.merge

    @property
    def useful_candidates(self) -> int:
        return self._sequence.useful_candidates

    @property
    def num_drafters(self) -> int:
        return self._sequence.num_sharing

    @property
    def ready_since(self) -> float:
        return self._sequence.ready_since

    @property
    def is_coupled(self) -> bool:
        return rule_named(self._sequence.request.spec.rule).shares_noise

    @property
    def acceptance(self) -> float | None:
        return self._sequence.counts.acceptance

    @property
    def pace(self) -> float:
        return self._sequence.pace

    @property
    def crowd(self) -> int:
        return self._sequence.crowd

    @property
    def num_groups(self) -> int:
        return 1 + len(self._sequence.replicas)

    @property
    def verifying(self) -> bool:
        return self._ahead is not None

    @property
    def waits_in_vain(self) -> bool:
        return self._sequence.draft_exhausted or self._sequence.drafter is None
