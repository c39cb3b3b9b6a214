"""Sequences without a place in a batch, in the order of arrival, and suspects among them.

Sequences go in the order of arrival within a priority, and of priorities the highest goes first. A
sequence that is passed MOST_PASSED times goes next all the same, so none waits forever.

A target may be lost during a step because of one of its sequences, and that sequence would end it
again. So all sequences of the step become suspects. A suspect is tried alone, to find the cause: it
is computed again with no other in its steps until it has TRIAL_VERDICTS verdicts. Meanwhile:

- Suspects are let in before all others, and one at a time into a group. While one waits, only
  suspects are let in. While one runs in a group, no other sequence is let into that group.
- Sequences that run in that group already go on in every other step (batching.py).

So a request that ends the target costs other sequences their KV at most twice: in the step that
made all of them suspects, and once more for sequences that have run since. Those are not let in
again while there is a suspect.

If the target is lost while it computes a suspect alone, and its group has answered other sequences
since the previous loss, the suspect is refused. Otherwise it is tried again after the other
suspects. So no request is blamed for a target that answers no request at all. A request without
others to compare with is refused after MOST_LOST_STEPS losses. That number allows for losses that
have another cause.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.decoding.sequence import Sequence

TRIAL_VERDICTS = 2
"""Verdicts that clear a suspect: one that ends its prefill, and one of a decoding step."""

MOST_LOST_STEPS = 4
"""Lost steps in a row after which a suspect is refused in any case. A worker's process is ended
after one failure less (workers/target/faults.py), so the last try is in a fresh process."""


MOST_PASSED = 8
"""How often in a row the sequence that waits longest is passed by others of a higher priority."""


@dataclass(slots=True)
class _Trial:
    """`lost_steps`: in a row. `lost_at`: answered steps then. `verdicts`: since then."""

    lost_steps: int = 0
    lost_at: int = 0
    verdicts: int = 0


class Suspects:
    """The suspects, by sequence id. A sequence leaves when it is cleared or ends."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def __len__(self) -> int:
        return len(self._trials)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._trials

    def lost(
        self, sequence_id: int, *, alone: bool, now: int, others_answered_at: int
    ) -> int | None:
        """The target was lost in a step of the sequence.

        `alone`: no other was in the step. `now` counts answered steps; `others_answered_at` is that
        count at the group's last answer that cleared its sequences. Returns the number of losses if
        the sequence is to be refused, else None.
        """
        trial = self._trials.setdefault(sequence_id, _Trial(lost_at=now))
        others_answered = trial.lost_steps > 0 and others_answered_at > trial.lost_at
        trial.lost_steps += 1
        trial.lost_at, trial.verdicts = now, 0
        if alone and (others_answered or trial.lost_steps >= MOST_LOST_STEPS):
            return trial.lost_steps
        return None

    def answered(self, sequence_id: int) -> bool:
        """A sequence has a verdict. Returns whether it is no suspect now."""
        trial = self._trials.get(sequence_id)
        if trial is None:
            return True
        trial.verdicts += 1
        if trial.verdicts < TRIAL_VERDICTS:
            return False
        del self._trials[sequence_id]
        return True

    def forget(self, sequence_id: int) -> None:
        self._trials.pop(sequence_id, None)

    def first_of(self, sequences: Iterable[Sequence]) -> Sequence | None:
        """The suspect to try next: the one lost least often; of several, the first to arrive."""
        return min(
            (one for one in sequences if one.sequence_id in self._trials),
            key=lambda one: (self._trials[one.sequence_id].lost_steps, one.order),
            default=None,
        )


class WaitingLine(deque[Sequence]):
    """The waiting line of all target groups. `first` goes first, wherever there is room.

    Suspects go before all others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.suspects = Suspects()
        self._has_priorities = False
        self._num_passed = 0

    @property
    def first(self) -> Sequence:
        suspect = self.suspects.first_of(self) if self.suspects else None
        if suspect is not None:
            return suspect
        if not self._has_priorities or self._num_passed >= MOST_PASSED:
            return self[0]
        return max(self, key=_priority)  # Of equal ones, the first.

    def append(self, sequence: Sequence) -> None:
        """Add a sequence that arrived last."""
        self._has_priorities |= sequence.request.priority != 0
        super().append(sequence)

    def let_in(self, sequence: Sequence) -> None:
        """Take `sequence` out, because it gets a place."""
        if sequence is self[0]:
            self._num_passed = 0
        elif sequence.sequence_id not in self.suspects:
            self._num_passed += 1
        self.remove(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Insert a sequence that lost its place, before those that arrived after it."""
        self.insert(bisect(self, sequence.order, key=_order), sequence)


def _priority(sequence: Sequence) -> int:
    return sequence.request.priority


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
