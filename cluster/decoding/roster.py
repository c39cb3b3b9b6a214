"""The drafters that can be used now: how fast, how loaded, how reliable; which one to choose."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from cluster.decoding.events import DrafterJoined
from cluster.decoding.policies import MOST_CHAINS
from cluster.decoding.sequence import Sequence

_SLOW_CHANGE = 0.9
"""The weight of the mean duration of a drafter's passes when another pass is added."""

MALFORMED_LIMIT = 3
"""The number of malformed proposals that makes a drafter suspect."""

UNANSWERED_OUTCOMES, UNANSWERED_SECONDS = 4, 10.0
"""A drafter that answers none of this many outcomes for this many seconds is taken for dead. A live
drafter answers each outcome, even if only to say that it has nothing to propose."""

FIRST_REST, LONGEST_REST = 10.0, 60.0
"""Seconds for which a drafter that is taken for dead gets no work; each time twice as long."""

MESSAGE_ENTRIES = 4
"""Entries that a message itself counts as, added to those in it (drafting.proto, ProposalBatch)."""

FIRST_ALLOWANCE = 1024.0
"""Entries that a drafter may tell beyond what it is granted. An honest one needs none of them."""

ALLOWED_ROUNDS = 8
"""Rounds of outcomes whose unused allowance adds up; older allowance is lost. One round is used
while the next is under way."""

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
    pass_ms: float = 0.0  # the mean of passes of all kinds; `auto` tells kinds apart (DraftTimes)
    malformed: int = 0
    heard_at: float = 0.0
    steps_unheard: int = 0
    shunned_until: float = 0.0
    # Outcomes that it has not answered, and since when it owes an answer.
    unanswered: int = 0
    owes_since: float | None = None
    rests_until: float | None = None
    rest: float = FIRST_REST
    # Entries that it may still tell. The most that an outcome added, the most sequences at once.
    allowance: float = FIRST_ALLOWANCE
    most_granted: float = 0.0
    most_load: int = 0
    # Sequences that have left it since the last step.
    freed: int = 0

    def allow(self, entries: float) -> None:
        """Add to its allowance: an outcome or a grant for one of its sequences was sent."""
        self.most_granted = max(self.most_granted, entries)
        self.most_load = max(self.most_load, self.load)
        most = FIRST_ALLOWANCE + ALLOWED_ROUNDS * self.most_granted * self.most_load
        if self.allowance < most:
            self.allowance = min(self.allowance + entries, most)

    @property
    def seems_dead(self) -> bool:
        """Whether it rests, for it answered nothing."""
        return self.rests_until is not None

    def fits(self, sequence: Sequence) -> bool:
        """Whether it can draft for this sequence at all."""
        request, own = sequence.request, self.joined
        return (
            sequence.tree.num_committed < own.max_position
            and request.spec.rule in own.rules
            and request.drafter_kind in (None, own.kind)
            and not self.seems_dead
            and (
                own.drafter not in sequence.declined_by or sequence.declined_by[own.drafter].is_over
            )
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
        known.unanswered, known.owes_since = 0, None
        if drafted:
            known.rest = FIRST_REST
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

    def overdraws(self, drafter: str, entries: int) -> bool:
        """Take a message's entries from its allowance; whether that is exceeded now."""
        known = self.get(drafter)
        if known is None:
            return False
        known.allowance -= MESSAGE_ENTRIES + entries
        return known.allowance < 0

    def taken_for_dead(self, now: float) -> list[str]:
        """Those that owe an answer for too long, and rest from now on."""
        dead = []
        for name, one in self.items():
            if one.unanswered and one.owes_since is None:
                one.owes_since = now
            if (
                one.unanswered >= UNANSWERED_OUTCOMES
                and one.owes_since is not None
                and now - one.owes_since >= UNANSWERED_SECONDS
            ):
                one.unanswered, one.owes_since = 0, None
                one.rests_until = now + one.rest
                one.rest = min(2 * one.rest, LONGEST_REST)
                dead.append(name)
        return dead

    def rested(self, now: float) -> bool:
        """End the rest of those that have rested; whether there were any."""
        found = False
        for one in self.values():
            if one.rests_until is not None and one.rests_until <= now:
                one.rests_until, found = None, True
        return found

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
                not one.joined.has_model,
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
