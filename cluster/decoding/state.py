"""What the scheduler owns, and what each of its parts may do to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from cluster.decoding.auto import Controller
from cluster.decoding.batching import Batching
from cluster.decoding.drafters import Drafters
from cluster.decoding.instructions import Finish, FinishReason, Instruction
from cluster.decoding.sequence import Sequence
from cluster.decoding.step_costs import StepCosts
from cluster.decoding.totals import Totals
from cluster.decoding.utilisation import Utilisation


@dataclass(slots=True)
class Outbox:
    """Instructions that wait until the next step is on its way: drafters first, then callers."""

    drafters: list[Instruction] = field(default_factory=list)
    callers: list[Instruction] = field(default_factory=list)


class DecodingState:
    """Every sequence, the block pool, the grants and the counts."""

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self.costs = StepCosts()
        self.drafters = Drafters(self.costs)
        self.auto = Controller()
        self.totals = Totals()
        self.utilisation = Utilisation()

    def sequences(self) -> Iterable[Sequence]:
        """Those that wait, then those that run."""
        return chain(self.batching.waiting, self.batching.running.values())

    def find(self, sequence_id: int) -> Sequence | None:
        """The sequence of that id, if it has not ended."""
        running = self.batching.running.get(sequence_id)
        if running is not None:
            return running
        return next((s for s in self.batching.waiting if s.sequence_id == sequence_id), None)

    def assign(self, out: Outbox) -> None:
        """Give running sequences the drafters that they want."""
        running = self.batching.running.values()
        self.drafters.share_out(running, out.drafters)  # those who have several give some back
        for sequence in running:
            self.drafters.assign(sequence, out.drafters)
        self.drafters.share_out(running, out.drafters)

    def finish(self, now: float, sequence: Sequence, reason: FinishReason, out: Outbox) -> None:
        """The sequence ended; it is in no step."""
        self.batching.remove(sequence)
        self.drafters.release(sequence, out.drafters)
        self.totals.finished += 1
        out.callers.append(
            Finish(sequence.sequence_id, reason, sequence.stats(now, self.utilisation))
        )
