"""A target group: what runs there, and its step in flight."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.decoding.batching import Batching
from cluster.decoding.instructions import RunStep
from cluster.decoding.sequence import Sequence


@dataclass(slots=True)
class Group:
    """One of the groups that serve the target's model; groups share nothing but the line."""

    number: int
    batching: Batching
    step: RunStep | None = None

    @property
    def joined(self) -> bool:
        """Whether it can step."""
        return self.batching.target is not None

    def cost_of(self, sequence: Sequence) -> tuple[int, int]:
        """How dear it is to run a sequence here: for the others, then for itself."""
        return len(self.batching.running), -self.batching.kv.num_known(sequence)

    def check_integrity(self) -> None:
        """Assert every invariant of this group."""
        self.batching.check_integrity()
        in_flight = {part.sequence_id for part in self.step.slices} if self.step else set()
        running = self.batching.running
        assert in_flight == {s.sequence_id for s in running.values() if s.in_flight is not None}
        assert all(s.group == self.number for s in running.values())
