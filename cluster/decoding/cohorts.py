"""Cohorts of `auto`: sequences that are alike and follow one plan.

Sequences are alike if they have the same drafter and the same bounds, and their drafts are accepted
about as often. They decide together, because what one of them does, all will do: a choice that
looks free while the others stand still may ruin a step when all make it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.decoding.choices import Choice
from cluster.decoding.pilot import Acceptance, Pilot

_LEVEL, _STAYS = 0.3, 0.22
"""Levels tell sequences apart by how far their acceptance is from what is usual with their drafter.
Levels are 0.3 apart. A sequence keeps its level while it is within 0.22 of it."""

SHARE_IN_TRIAL = 4
"""One member in this many, and at least one, tries an option of which little is known."""

STANDS, FIRST_STANDS = 8, 2
"""Steps for which a choice stands, and for which it stands at first and during a trial."""

RESIZED = 1.5
"""A cohort that grew or shrank by this factor since its last choice needs a new one."""

_LONG_AGO = 32
"""Steps after which observations of other members count for little."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """What the sequences of a cohort have in common. `level`: 0 for the usual acceptance."""

    drafter: str
    level: int
    limit: int
    branches: int
    rule: str
    merge: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What a cohort does. With choice `off` it decodes plainly, except for probes.

    `promised`: forecast tokens of a sequence in the time of one step. `patience`: seconds that a
    sequence may wait. `messages`: proposals for a sequence in a step. `hopeful`: drafting would
    pay if most candidates were right.
    """

    choice: Choice
    window: int
    promised: float = 1.0
    patience: float = math.inf
    messages: float = 0.0
    hopeful: bool = True
    told: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Cohort:
    """One cohort and its plans.

    `members`: sequences that had a verdict in the last step, with `candidates` in all. `behind`:
    members that do not follow the plan yet. `trial`: a plan that promises more but of which little
    is known; `trying` members follow it. `rest_for`: steps for which a plan to rest stands.
    `decided_for`: the number of members at the last choice.
    """

    like: Likeness
    acceptance: Acceptance
    member: Pilot
    """One of the members. It says what the requests allow."""
    plan: Plan | None = None
    trial: Plan | None = None
    decided_at: int = 0
    decisions: int = 0
    rest_for: int = 0
    doubted: bool = False
    decided_for: int = 0
    members: int = 0
    candidates: int = 0
    trying: int = 0
    behind: int = 0
    seen_at: int = 0
    _members_now: int = 0
    _candidates_now: int = 0
    _trying_now: int = 0
    _behind_now: int = 0

    def judged(self, window: int) -> None:
        """Count a verdict on a member's window of `window` candidates."""
        self._members_now += 1
        self._candidates_now += window

    def tries(self, pilot: Pilot) -> bool:
        """Whether this member follows the trial. Those that already do keep doing so."""
        if self.trial is None:
            return False
        if pilot.choice is not self.trial.choice:
            at_most = max(1, self.members // SHARE_IN_TRIAL)
            if max(self.trying, self._trying_now) >= at_most:
                return False
        self._trying_now += 1
        return True

    def overdue(self, step: int) -> int:
        """Steps since a new choice became due, times the members; 0: none is due."""
        if not self.members or self.seen_at < step - 1:
            return 0
        is_early = self.trial is not None or self.decisions <= FIRST_STANDS
        stands = FIRST_STANDS if is_early else STANDS
        resized = not 1 / RESIZED < self.members / max(1, self.decided_for) < RESIZED
        if self.plan is None or self.doubted or self.behind or resized:
            stands = 1
        elif self.plan.choice is Choice.OFF and self.trial is None:
            stands = self.rest_for
        return self.members * max(0, step - self.decided_at - stands + 1)

    def lags(self) -> None:
        """Count a member that does not follow the plan yet."""
        self._behind_now += 1

    def end_of_step(self, step: int) -> None:
        """End a step, after all of its verdicts were counted."""
        if self._members_now:
            if step - self.seen_at > _LONG_AGO:
                self.acceptance.fade()
            self.members, self.candidates = self._members_now, self._candidates_now
            self.seen_at = step
        self.trying, self.behind = self._trying_now, self._behind_now
        self._members_now = self._candidates_now = self._trying_now = self._behind_now = 0


class Cohorts:
    """All cohorts, by what their members have in common."""

    _MOST = 64

    def __init__(self) -> None:
        self._cohorts: dict[Likeness, Cohort] = {}

    def of(self, pilot: Pilot, drafter: str, usual: Acceptance) -> Cohort:
        """The cohort of a sequence, old or new. `usual`: the acceptance of all that it drafted."""
        above = pilot.acceptance.mean - usual.mean
        level = _level(above, pilot.level)
        if pilot.cohort is not None and level == pilot.level:
            return pilot.cohort
        pilot.level = level
        like = Likeness(drafter, level, pilot.limit, pilot.branches, pilot.rule, pilot.merge)
        cohort = self._cohorts.get(like)
        if cohort is None:
            first_guess = pilot.acceptance.mean if level else usual
            cohort = self._cohorts[like] = Cohort(like, Acceptance(first_guess), pilot)
        pilot.cohort = cohort
        return cohort

    def end_of_step(self, step: int) -> None:
        """End a step, after all of its verdicts were counted. Drop the oldest cohort over 64."""
        for cohort in self._cohorts.values():
            cohort.end_of_step(step)
        if len(self._cohorts) > self._MOST:
            oldest = min(self._cohorts.values(), key=lambda cohort: cohort.seen_at)
            del self._cohorts[oldest.like]

    def most_overdue(self, step: int) -> Cohort | None:
        """The cohort whose choice has been due longest, weighted by members; None: none is due."""
        due = [(cohort.overdue(step), cohort) for cohort in self._cohorts.values()]
        return max((one for one in due if one[0]), key=lambda one: one[0], default=(0, None))[1]

    def doubt(self) -> None:
        """Have every choice made anew: a belief behind them turned out to be wrong."""
        for cohort in self._cohorts.values():
            cohort.doubted = True


def _level(above: float, before: int | None) -> int:
    """The nearest level, or the one `before` while the acceptance is still near it."""
    if before is not None and abs(above - before * _LEVEL) <= _STAYS:
        return before
    return round(above / _LEVEL)
