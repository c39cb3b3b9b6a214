"""Which drafter works for which sequence, and what it is told."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.decoding.instructions import (
    CloseDraft,
    Grant,
    Instruction,
    OpenDraft,
    SendOutcome,
)
from cluster.decoding.sequence import Sequence


class Drafters:
    """The drafters that can be used now. Every method appends its instructions to `out`."""

    def __init__(self) -> None:
        self._max_position: dict[str, int] = {}
        self._load: dict[str, int] = {}

    def join(self, drafter: str, max_position: int) -> None:
        """A drafter can be used; it knows no sequence."""
        assert drafter not in self._load, f"{drafter} joined twice"
        self._max_position[drafter] = max_position
        self._load[drafter] = 0

    def lose(self, drafter: str, sequences: Iterable[Sequence]) -> None:
        """A drafter is gone, and what it knew with it."""
        self._max_position.pop(drafter, None)
        self._load.pop(drafter, None)
        for sequence in sequences:
            sequence.declined_by.discard(drafter)
            if sequence.drafter == drafter:
                _forget(sequence)

    def known(self, drafter: str) -> bool:
        """Whether it has joined."""
        return drafter in self._load

    def assign(self, sequence: Sequence, out: list[Instruction]) -> None:
        """Give the sequence the least loaded drafter that will have it, if it wants one."""
        if sequence.drafter is not None or not sequence.policy.drafts:
            return
        length = sequence.path.num_committed
        able = [
            name
            for name, limit in self._max_position.items()
            if length < limit and name not in sequence.declined_by
        ]
        if not able:
            return
        drafter = min(able, key=lambda name: (self._load[name], name))
        self._load[drafter] += 1
        sequence.drafter = drafter
        sequence.draft_limit = self._max_position[drafter]
        spec, committed = sequence.request.spec, sequence.path.committed()
        out.append(OpenDraft(drafter, sequence.sequence_id, spec, committed))
        self.grant(sequence, out)

    def grant(self, sequence: Sequence, out: list[Instruction]) -> None:
        """Tell its drafter how far it may draft, where that has changed."""
        if sequence.drafter is None:
            return
        candidates = sequence.policy.granted_candidates(sequence.draft_view())
        until = sequence.path.num_committed + candidates
        if until != sequence.granted_until:
            sequence.granted_until = until
            out.append(Grant(sequence.drafter, sequence.sequence_id, until))

    def outcome(
        self, sequence: Sequence, position: int, token_ids: tuple[int, ...], out: list[Instruction]
    ) -> None:
        """Tell its drafter what was committed, and how far it may go now."""
        if sequence.drafter is None:
            return
        out.append(SendOutcome(sequence.drafter, sequence.sequence_id, position, token_ids))
        self.grant(sequence, out)

    def decline(self, drafter: str, sequence: Sequence, out: list[Instruction]) -> None:
        """A drafter will not work for the sequence; another may."""
        sequence.declined_by.add(drafter)
        if sequence.drafter == drafter:
            self._load[drafter] -= 1
            _forget(sequence)
            self.assign(sequence, out)

    def release(self, sequence: Sequence, out: list[Instruction]) -> None:
        """The sequence ended."""
        if sequence.drafter is not None:
            out.append(CloseDraft(sequence.drafter, sequence.sequence_id))
            self._load[sequence.drafter] -= 1
            _forget(sequence)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that loads count the sequences that they should."""
        counted = dict.fromkeys(self._load, 0)
        for sequence in sequences:
            if sequence.drafter is not None:
                counted[sequence.drafter] += 1
        assert counted == self._load


def _forget(sequence: Sequence) -> None:
    sequence.drafter = None
    sequence.draft_limit = 0
    sequence.granted_until = 0
    sequence.draft_exhausted = False
