"""What `auto` chooses for whom: choices, the pilot of each sequence, cohorts that follow one plan.

A choice is a policy with or without trees. A pilot is what the chooser keeps of one sequence:
how often its drafts are accepted, and the choice that it follows. A cohort is all sequences that
are alike, and its plan. Sequences are alike if they have the same drafter and the same bounds, and
their drafts are accepted about as often. They decide together, because each alone would decide the
same: a choice that costs nothing if one sequence makes it may ruin a step if all make it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.events import Request
from cluster.decoding.policies import chain, fanout, off
from cluster.decoding.policies.off import Off
from cluster.decoding.policy import POLICIES, LookaheadPolicy
from workers.verification.rule import rule_named

TREE_WIDTH = 2
"""Candidates at one position of a tree. A drafter's second guess is right far more often than its
third, and with more branches each gets fewer candidates."""

FIRST_GUESS = 0.7
"""Acceptance assumed for a drafter before anything is observed."""

MAX_POSITION = 12
"""Acceptance is estimated by position of the window up to here; later ones are like the last."""

FIRST_PROBE, LAST_PROBE = 16, 512
"""Plain verdicts before a probe. The number doubles after each failed probe, up to the last."""

UNSETTLED = 2
"""Verdicts after a policy change that still reflect the old policy. Those of one round trip come on
top."""

FIRST_WINDOW = 4
"""Candidates on a path that a step verifies while nothing is known of a drafter."""

_LEANING = 8.0
"""Weight of the prior of a sequence's acceptance, in tried candidates. The prior is the acceptance
of its drafter."""

_RECENT = 0.98
_TRUST = 40.0
"""Weight, in tokens, of the initial correction 1. A policy's own tokens outweigh it slowly."""

_FORGET = 0.002

_LEVEL, _STAYS = 0.3, 0.22
"""A level is the distance of a sequence's acceptance from the usual one of its drafter. Levels are
0.3 apart. A sequence keeps its level while it is within 0.22 of it."""

SHARE_IN_TRIAL = 4
"""One in SHARE_IN_TRIAL members, and at least one, tries an option with few observations."""

STANDS, FIRST_STANDS = 8, 2
"""Steps until a choice is made again: STANDS, or FIRST_STANDS for first choices and in a trial."""

RESIZED = 1.5
"""A cohort that grew or shrank by this factor since its last choice needs a new one."""

_LONG_AGO = 32
"""Steps after which observations of other members count for little."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A policy, with or without trees. There is one of each (`choice_of`).

    `name`: in the statistics. `width`: candidates that a step verifies at one position. If it is
    above 1, a step verifies the chain and the likeliest candidates held for other outcomes. If none
    are held (`chain`, and `fanout` in a large batch), the drafter grows a tree instead.
    """

    name: str
    policy: LookaheadPolicy
    width: int

    @property
    def is_tree(self) -> bool:
        """Whether steps verify several candidates at a position."""
        return self.width > 1

    @property
    def rests(self) -> bool:
        """Whether it is plain decoding."""
        return not self.policy.drafts

    def allowed(self, rule: str, *, branches: int, merge: bool) -> bool:
        """Whether a request can follow this choice. `merge`: it merges drafters.

        The trees of a choice need the coupled rule. Requests with branches or merged drafters
        verify trees under every policy, so they cannot have these.
        """
        needs = self.policy.needs
        if merge and not needs.allow_merging:
            return False
        if self.is_tree and (branches > 1 or merge or not rule_named(rule).shares_noise):
            return False
        return needs.serve(rule) and not (needs.chains_only and branches > 1)


@cache
def choice_of(policy: LookaheadPolicy, width: int = 1) -> Choice:
    """The choice of a policy, with trees if `width` is above 1."""
    return Choice(policy.name if width == 1 else f"{policy.name}-tree", policy, width)


OFF, CHAIN, FANOUT = choice_of(off.OFF), choice_of(chain.CHAIN), choice_of(fanout.FANOUT)


@cache
def drafting_choices() -> tuple[Choice, ...]:
    """The choices among which `auto` chooses if it drafts, in the order of their places.

    A policy has trees too, unless it takes only chains or waits for its drafter.
    """
    found = []
    placed = [one for one in POLICIES.all().values() if one.place_in_auto is not None]
    for policy in sorted(placed, key=lambda one: one.place_in_auto or 0):
        found.append(choice_of(policy))
        if not (policy.needs.chains_only or policy.waits):
            found.append(choice_of(policy, TREE_WIDTH))
    return tuple(found)


class Acceptance:
    """The chance that a candidate is right if those before it are, by position of the window.

    While observations are few, it leans on `prior`: the chance over many sequences, or a first
    guess.
    """

    __slots__ = ("_accepted", "_prior", "_prior_weight", "_tried", "candidates")

    DECAY = 0.97
    """The factor by which earlier counts shrink with each verdict of a sequence."""

    FADED = 0.2

    def __init__(self, prior: Acceptance | float, *, prior_weight: float = 4.0) -> None:
        self._prior = prior
        self._prior_weight = prior_weight
        self._tried = [0.0] * MAX_POSITION
        self._accepted = [0.0] * MAX_POSITION
        self.candidates = 0
        """Candidates tried in total."""

    def add(self, rights: Sequence[bool], *, sequences: int = 1) -> None:
        """Add a verdict. `rights`: for each position from the first on, whether it was right.

        `sequences`: the number of sequences whose verdicts are all added here.
        """
        self.candidates += len(rights)
        kept = 1 - (1 - self.DECAY) / sequences
        for place, right in enumerate(rights[:MAX_POSITION]):
            self._tried[place] = self._tried[place] * kept + 1
            self._accepted[place] = self._accepted[place] * kept + right

    def fade(self) -> None:
        """Reduce the weight of old observations, because they are too old to count in full."""
        self._tried = [tried * self.FADED for tried in self._tried]
        self._accepted = [accepted * self.FADED for accepted in self._accepted]

    def chance(self, position: int) -> float:
        """The chance at a position, from 1 on.

        It leans on the mean of all positions, and that mean leans on the prior.
        """
        return self.chances(position)[-1]

    @property
    def mean(self) -> float:
        """The chance over all positions together."""
        prior = self._prior.mean if isinstance(self._prior, Acceptance) else self._prior
        weight = self._prior_weight
        return (sum(self._accepted) + weight * prior) / (sum(self._tried) + weight)

    def chances(self, count: int) -> tuple[float, ...]:
        """The chances at positions 1 to `count`."""
        weight, leaning = self._prior_weight, self._prior_weight * self.mean
        found = [
            (accepted + leaning) / (tried + weight)
            for accepted, tried in zip(self._accepted[:count], self._tried[:count], strict=True)
        ]
        return (*found, *found[-1:] * (count - len(found)))


class Resting(Off):
    """Plain decoding with an assigned drafter, which is told what is committed."""

    drafts = True


RESTING = Resting()


@dataclass(slots=True)
class Pilot:
    """What the chooser keeps of one sequence.

    `limit`: the most candidates that the request allows. `level`: how its acceptance compares with
    what is usual (`Cohorts`). `promised`: forecast tokens in the time of one step. `patience`:
    seconds that a waiting policy may wait. `restarted_at`: when a verdict left the sequence without
    candidates; None once new ones came. `verdicts`: since the policy changed. `trying`: the
    sequence drafts only to measure its acceptance, at its beginning or as a probe. `probe_after`:
    verdicts that it rests before the next probe; 0 before the first one.
    """

    limit: int
    branches: int
    rule: str
    merge: bool = False
    drafter: str | None = None
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(FIRST_GUESS))
    level: int | None = None
    cohort: Cohort | None = None
    choice: Choice = CHAIN
    policy: LookaheadPolicy = CHAIN.policy
    window: int = 1
    promised: float = 0.0
    patience: float = math.inf
    restarted_at: float | None = None
    last_verdict_at: float | None = None
    verdicts: int = 0
    trying: bool = False
    tried_from: int = 0
    probe_after: int = 0
    choices: dict[str, int] = field(default_factory=dict)
    until_branches: float = UNSETTLED
    """Verdicts until the first branches of a policy should be held; 0: they came, or are due."""
    told: Mapping[str, float] = field(default_factory=dict)
    """The estimates of the plan that it follows, as the statistics show them."""

    @classmethod
    def of(cls, request: Request) -> Pilot:
        """The pilot of a sequence that begins."""
        window = min(request.window, FIRST_WINDOW * request.branches)
        return cls(
            limit=request.window,
            branches=request.branches,
            rule=request.spec.rule,
            merge=request.merge,
            window=window,
        )

    def meets(self, drafter: str, known: Acceptance) -> None:
        """Assign a drafter. `known`: the acceptance of everything that this drafter drafted."""
        self.drafter = drafter
        self.level = self.cohort = None
        self.acceptance = Acceptance(known, prior_weight=_LEANING)

    @property
    def estimates(self) -> dict[str, float]:
        """What the statistics say of its choice (inference.proto, SpeculationStats.estimates)."""
        return {"acceptance": self.acceptance.mean, **self.told} if self.told else {}

    @property
    def rests(self) -> bool:
        """Whether the sequence decodes plainly."""
        return self.policy is RESTING

    def rest(self) -> None:
        """Decode plainly until the next probe. After a failed probe the rest is twice as long."""
        failed_again = self.trying and self.probe_after > 0
        self.probe_after = min(2 * self.probe_after, LAST_PROBE) if failed_again else FIRST_PROBE
        self.choice, self.policy = OFF, RESTING
        self.promised = 1.0
        self.trying, self.verdicts = False, 0

    def try_out(self, window: int) -> None:
        """Draft for a few steps with `window` candidates a path, to measure acceptance."""
        self.follow(CHAIN)
        self.window = min(self.limit, window * self.branches)
        self.promised = 0.0
        self.trying, self.verdicts = True, 0
        self.acceptance.fade()
        self.tried_from = self.acceptance.candidates

    @property
    def asks_for_trees(self) -> bool:
        """Whether any candidate at a position may be the right one, not only the first."""
        return self.branches > 1 or self.merge

    def rights(self, verdict: CountedVerdict) -> tuple[bool, ...]:
        """For each position that a verdict looked at: whether its first candidate was right.

        Where the request asks for trees: whether any candidate of the position was. Candidates held
        for the position of the verdict's own token count as well.
        """
        if verdict.firsts is not None and not self.asks_for_trees:
            rights = verdict.firsts
            judges_held = len(rights) == verdict.accepted
        else:
            rights = (True,) * verdict.accepted + (False,) * (verdict.tried - verdict.accepted)
            judges_held = verdict.accepted == verdict.depth
        if judges_held and verdict.foresight is not Foresight.NOTHING:
            rights += (verdict.foresight is Foresight.FIRST,)
        return rights

    def follow(self, choice: Choice) -> None:
        """Follow `choice` from now on."""
        if not choice.policy.fans_out:
            self.until_branches = UNSETTLED
        self.choice, self.policy = choice, choice.policy

    def allows(self, choice: Choice) -> bool:
        """Whether the request permits `choice`."""
        return choice.allowed(self.rule, branches=self.branches, merge=self.merge)


@dataclass(slots=True)
class Correction:
    """How a policy's real tokens compare with its forecast. Recent verdicts weigh most."""

    brought: float = _TRUST
    forecast: float = _TRUST

    def add(self, brought: float, forecast: float, *, of: int) -> None:
        """Add a verdict's real and forecast tokens. `of`: sequences of its step."""
        kept = 1 - (1 - _RECENT) / of
        self.brought = self.brought * kept + brought / of
        self.forecast = self.forecast * kept + forecast / of

    def forget(self, *, of: int) -> None:
        """Move the factor a little towards 1. `of`: sequences of the step."""
        self.brought += _FORGET / of * (self.forecast - self.brought)

    @property
    def factor(self) -> float:
        return self.brought / self.forecast


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
    members that do not follow the plan yet. `trial`: a plan that promises more but has few
    observations; `trying` members follow it. `rest_for`: steps for which a plan to rest stands.
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
        elif self.plan.choice.rests and self.trial is None:
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
        """Make every choice again, because an estimate behind them turned out to be wrong."""
        for cohort in self._cohorts.values():
            cohort.doubted = True


def _level(above: float, before: int | None) -> int:
    """The nearest level, or the one `before` while the acceptance is still near it."""
    if before is not None and abs(above - before * _LEVEL) <= _STAYS:
        return before
    return round(above / _LEVEL)
