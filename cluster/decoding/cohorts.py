"""Sequences of `auto` that are alike: what they share, and what was decided for all of them.

Alike are those with the same drafter and the same bounds whose drafts are accepted about as
often. They decide together, since what one of them does, all will do: a choice that looks free
while the others stand still may be what ruins a step when all make it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.decoding.choices import Choice
from cluster.decoding.pilot import Acceptance, Pilot
from paceline.rules import Rule

_LEVEL, _STAYS = 0.3, 0.22
"""Sequences are told apart by how far their acceptance is from what is usual with their drafter, in
steps of the first; it stays at its step for so far as the second."""

SHARE_IN_TRIAL = 4
"""One in so many of a cohort, and at least one, tries what little is known of."""

STANDS, FIRST_STANDS = 8, 2
"""A choice stands for so many steps; for fewer at first, and while something is tried."""

RESIZED = 1.5
"""A cohort so many times as large as when it was chosen for, or as small, needs another choice."""

_LONG_AGO = 32
"""Steps after which what was seen of other members counts for little."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """What sequences of a cohort have in common. `level`: 0 for the acceptance that is usual."""

    drafter: str
    level: int
    limit: int
    branches: int
    rule: Rule
    merge: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What a cohort does; where `choice` is `off`, it decodes plainly, but for probes.

    `promised`: tokens of a sequence in the time of a step. `patience`: seconds that one may wait.
    `messages`: proposals for a sequence in a step. `hopeful`: candidates would be worth their
    price if most of them were right.
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
    """`members` had verdicts in the last step, with so many `candidates` in all.

    `behind`: of these, such as do not follow the plan yet. `trial`: what a few try that promises
    more than the plan, while little is known of it; `trying` of the members do. `rest_for`: steps
    for which a plan to rest stands. `decided_for`: so many members.
    """

    like: Likeness
    acceptance: Acceptance
    member: Pilot
    """One of them, which says what is allowed."""
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
        """A verdict on a member's window."""
        self._members_now += 1
        self._candidates_now += window

    def tries(self, pilot: Pilot) -> bool:
        """Whether a member follows the trial: some do, the same as before."""
        if self.trial is None:
            return False
        if pilot.choice is not self.trial.choice:
            at_most = max(1, self.members // SHARE_IN_TRIAL)
            if max(self.trying, self._trying_now) >= at_most:
                return False
        self._trying_now += 1
        return True

    def overdue(self, step: int) -> int:
        """How many steps ago a new choice was due, times members; 0: it is not."""
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
        """A member does not follow the plan yet."""
        self._behind_now += 1

    def end_of_step(self, step: int) -> None:
        """All verdicts of a step were counted."""
        if self._members_now:
            if step - self.seen_at > _LONG_AGO:
                self.acceptance.fade()
            self.members, self.candidates = self._members_now, self._candidates_now
            self.seen_at = step
        self.trying, self.behind = self._trying_now, self._behind_now
        self._members_now = self._candidates_now = self._trying_now = self._behind_now = 0


class Cohorts:
    """All cohorts, found by what their members have in common."""

    _MOST = 64

    def __init__(self) -> None:
        self._cohorts: dict[Likeness, Cohort] = {}

    def of(self, pilot: Pilot, drafter: str, usual: Acceptance) -> Cohort:
        """The cohort of a sequence, which may be a new one. `usual`: with this drafter."""
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
        """All verdicts of a step were counted."""
        for cohort in self._cohorts.values():
            cohort.end_of_step(step)
        if len(self._cohorts) > self._MOST:
            oldest = min(self._cohorts.values(), key=lambda cohort: cohort.seen_at)
            del self._cohorts[oldest.like]

    def most_overdue(self, step: int) -> Cohort | None:
        """Whose choice should be made anew first."""
        due = [(cohort.overdue(step), cohort) for cohort in self._cohorts.values()]
        return max((one for one in due if one[0]), key=lambda one: one[0], default=(0, None))[1]

    def doubt(self) -> None:
        """What was decided rests on something that was wrong."""
        for cohort in self._cohorts.values():
            cohort.doubted = True


def _level(above: float, before: int | None) -> int:
    """The nearest level, or the one before while that is near enough."""
    if before is not None and abs(above - before * _LEVEL) <= _STAYS:
        return before
    return round(above / _LEVEL)
