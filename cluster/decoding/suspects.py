"""Sequences in whose step the target was lost: each is tried alone, so that the cause is found.

Nobody knows why a target is lost in the midst of a step. One of its sequences may be why, and would
be again. So all of them become suspects. A suspect is computed again with nobody else in its steps,
until it has TRIAL_VERDICTS verdicts. Meanwhile:

- Suspects are let in before all others, and into a group one at a time. While one waits, only
  suspects are let in, and while one runs in a group, nobody else is let into that group.
- Those who run in that group already go on in every other step (batching.py).

So a request that ends the target takes others' KV with it at most twice: with the step that made
all of them suspects, and once more for those who have run since. They are not let in again before
no suspect is left.

A suspect that is lost alone is refused once the group has answered others since the loss before;
until then it is tried again after the other suspects. So one request is not blamed for a target
that answers nobody. A request that nobody else can be compared with is refused after
MOST_LOST_STEPS losses, enough to survive some that have nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.decoding.sequence import Sequence

TRIAL_VERDICTS = 2
"""Verdicts that clear a suspect: one that ends its prefill, one of a decoding step."""

MOST_LOST_STEPS = 4
"""Lost steps in a row after which a suspect is refused, whatever others did: one more than a worker
may fail before its process is ended (workers/faults.py), so that a fresh one is tried too."""


@dataclass(slots=True)
class _Trial:
    """`lost_steps`: in a row; `lost_at`: by the count of answered steps; `verdicts`: since then."""

    lost_steps: int = 0
    lost_at: int = 0
    verdicts: int = 0


class Suspects:
    """By sequence id; whoever is cleared or ends is none any more."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def __len__(self) -> int:
        return len(self._trials)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._trials

    def lost(
        self, sequence_id: int, *, alone: bool, now: int, others_answered_at: int
    ) -> int | None:
        """The target was lost in a step of the sequence; after how many losses to refuse it, if so.

        `now` and `others_answered_at`, the last answer of its group that cleared its own sequences,
        count answered steps.
        """
        trial = self._trials.setdefault(sequence_id, _Trial(lost_at=now))
        others_answered = trial.lost_steps > 0 and others_answered_at > trial.lost_at
        trial.lost_steps += 1
        trial.lost_at, trial.verdicts = now, 0
        if alone and (others_answered or trial.lost_steps >= MOST_LOST_STEPS):
            return trial.lost_steps
        return None

    def answered(self, sequence_id: int) -> bool:
        """A sequence has a verdict; whether it is no suspect, or none any more."""
        trial = self._trials.get(sequence_id)
        if trial is None:
            return True
        trial.verdicts += 1
        if trial.verdicts < TRIAL_VERDICTS:
            return False
        del self._trials[sequence_id]
        return True

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._trials.pop(sequence_id, None)

    def first_of(self, sequences: Iterable[Sequence]) -> Sequence | None:
        """The suspect to try next: who was lost least often, of these who came first."""
        return min(
            (one for one in sequences if one.sequence_id in self._trials),
            key=lambda one: (self._trials[one.sequence_id].lost_steps, one.order),
            default=None,
        )
