"""A target group: the sequences that run there, and its step in flight."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.decoding.batching import Batching
from cluster.decoding.instructions import RunStep
from cluster.decoding.sequence import Replica, Sequence


@dataclass(slots=True)
class Group:
    """One of the groups that serve the target's model. They share only the waiting line."""

    number: int
    batching: Batching
    step: RunStep | None = None
    answered_at: int = 0
    """Number of answered steps, over all groups, when this one last answered without suspects."""

    @property
    def joined(self) -> bool:
        """Whether it can step."""
        return self.batching.target is not None

    def cost_of(self, sequence: Sequence) -> tuple[int, int, bool]:
        """Sort key for placing a sequence: what it costs the others here, then itself."""
        known = self.batching.kv.num_known(sequence)
        return self.num_leads, -known, self.step is not None

    @property
    def num_leads(self) -> int:
        """Sequences that run here, without the replicas of other groups' sequences."""
        running = self.batching.running.values()
        return len(running) - sum(isinstance(one, Replica) for one in running)

    def drop_replicas(self) -> bool:
        """Drop all replicas here; their own groups go on alone. Whether there were any."""
        replicas = [one for one in self.batching.running.values() if isinstance(one, Replica)]
        for one in replicas:
            self.drop(one)
        return bool(replicas)

    def drop(self, replica: Replica) -> None:
        """Drop a replica; the other groups of its sequence go on without this one."""
        self.batching.remove(replica)
        replica.lead.replicas.remove(replica)

    def check_integrity(self) -> None:
        """Assert every invariant of this group."""
        self.batching.check_integrity()
        in_flight = {part.sequence_id for part in self.step.slices} if self.step else set()
        running, leaving = self.batching.running, self.batching.leaving
        stepping = {s.sequence_id for s in running.values() if s.kv.in_flight is not None}
        assert in_flight == stepping | leaving.keys()
        assert not stepping & leaving.keys()
        assert all(s.kv.group == self.number for s in running.values())
        for one in running.values():
            assert not isinstance(one, Replica) or one in one.lead.replicas
