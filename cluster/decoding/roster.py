"""The drafters that can be used now: how fast, how loaded, how reliable; which one to choose."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from cluster.decoding.events import DrafterJoined
from cluster.decoding.policies import MOST_CHAINS
from cluster.decoding.sequence import Sequence

_SLOW_CHANGE = 0.9
"""Of the duration of a pass, so much is remembered from one to the next."""

MALFORMED_LIMIT = 3
"""So many malformed proposals make a drafter suspect."""

SILENT_STEPS, SILENT_SECONDS = 16, 0.25
"""A drafter with work that says nothing for so long is avoided where work may move."""

_SHUNNED_SECONDS = 5.0
_FORGOTTEN_SECONDS = 5.0
_MUCH_SLOWER = 2.0
_AS_FAST = 1.5


@dataclass(slots=True)
class RosterEntry:
    """One drafter: what it said of itself, how many sequences it has, what was seen of it."""

    joined: DrafterJoined
    load: int = 0
    pass_ms: float = 0.0
    malformed: int = 0
    heard_at: float = 0.0
    steps_unheard: int = 0
    shunned_until: float = 0.0

    def fits(self, sequence: Sequence) -> bool:
        """Whether it can draft for this sequence at all."""
        request, own = sequence.request, self.joined
        return (
            sequence.tree.num_committed < own.max_position
            and request.spec.rule in own.rules
            and request.drafter_kind in (None, own.kind)
            and own.drafter not in sequence.declined_by
        )


class Roster(dict[str, RosterEntry]):
    """Drafters by name."""

    def join(self, joined: DrafterJoined) -> None:
        """A drafter can be used; it knows no sequence."""
        assert joined.drafter not in self, f"{joined.drafter} joined twice"
        self[joined.drafter] = RosterEntry(joined, heard_at=joined.now)

    def heard(self, now: float, drafter: str, pass_seconds: float, *, drafted: bool) -> None:
        """A pass of the drafter took so long; `drafted`: it gave candidates."""
        known = self.get(drafter)
        if known is None:
            return
        known.heard_at, known.steps_unheard = now, 0
        if drafted and pass_seconds > 0:
            kept = _SLOW_CHANGE if known.pass_ms else 0.0
            known.pass_ms = kept * known.pass_ms + (1 - kept) * 1000 * pass_seconds

    def crowd(self, drafter: RosterEntry, most_chains: float) -> int:
        """Sequences among which a drafter's branches are shared out (policies.py, MOST_CHAINS): its
        own, or as many more as leave the driver no more than `most_chains` of all drafters.
        """
        shared = MOST_CHAINS * sum(one.load for one in self.values()) / most_chains
        return max(drafter.load, math.ceil(shared))

    def malformed(self, drafter: str) -> bool:
        """It sent a malformed proposal; whether it is suspect now, after three."""
        blamed = self.get(drafter)
        if blamed is None:
            return False
        blamed.malformed += 1
        return blamed.malformed >= MALFORMED_LIMIT

    def stepped(self, now: float) -> None:
        """A step was answered: those are avoided that have work and have been silent for long.

        How fast one was that has had no work for long is forgotten: it may not be slow any more.
        """
        for one in self.values():
            if not one.load and now - one.heard_at >= _FORGOTTEN_SECONDS:
                one.pass_ms = 0.0
            one.steps_unheard += one.load > 0
            if one.steps_unheard >= SILENT_STEPS and now - one.heard_at >= SILENT_SECONDS:
                one.shunned_until = now + _SHUNNED_SECONDS

    def best_for(
        self, sequence: Sequence, *, other_than: Collection[str] = ()
    ) -> RosterEntry | None:
        """The drafter that should work for the sequence, of those that do not.

        `other_than`: of another kind than these.
        """
        taken = {sequence.drafter, *sequence.helpers}
        able = [
            one
            for name, one in self.items()
            if name not in taken and one.fits(sequence) and one.joined.kind not in other_than
        ]
        if not able:
            return None
        fastest = min((one.pass_ms for one in able if one.pass_ms), default=0.0)
        return min(
            able,
            key=lambda one: (
                one.joined.kind != "model",
                one.shunned_until > sequence.ready_since,
                sequence.policy.spreads and one.pass_ms > _MUCH_SLOWER * fastest,
                one.load,
                one.joined.drafter,
            ),
        )


def is_better(one: RosterEntry, current: RosterEntry, now: float) -> bool:
    """Whether work should move from `current`: from silence, to much more speed, or off a crowd."""
    if one.shunned_until > now:
        return False
    if current.shunned_until > now:
        return True
    if is_much_faster(one, current):
        return True
    return one.pass_ms <= _AS_FAST * current.pass_ms and one.load + 2 <= current.load


def is_much_faster(one: RosterEntry, other: RosterEntry) -> bool:
    """Whether its passes are known to take less than half of the other's."""
    return 0 < _MUCH_SLOWER * one.pass_ms < other.pass_ms
