"""State that the controller of `auto` (auto.py) keeps for one sequence and for one policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.decoding.choices import Choice
from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.events import Request
from cluster.decoding.lookahead import LookaheadPolicy
from cluster.decoding.policies import Off

if TYPE_CHECKING:
    from cluster.decoding.cohorts import Cohort

FIRST_GUESS = 0.7
"""Acceptance assumed for a drafter of which nothing is known."""

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
"""Tried candidates that the drafter's acceptance weighs as the prior of a sequence's own."""

_RECENT = 0.98
_TRUST = 40.0
"""A policy's correction takes full effect after many more tokens than this."""
_FORGET = 0.002


class Acceptance:
    """The chance of a candidate given those before it, by position of the window.

    Few observations lean on `prior`: the same of many sequences, or a first guess.
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
        """How many were tried in all."""

    def add(self, rights: Sequence[bool], *, sequences: int = 1) -> None:
        """A verdict tried these positions from the first on; whether each candidate was right.

        `sequences`: the number of sequences whose verdicts are all added here.
        """
        self.candidates += len(rights)
        kept = 1 - (1 - self.DECAY) / sequences
        for place, right in enumerate(rights[:MAX_POSITION]):
            self._tried[place] = self._tried[place] * kept + 1
            self._accepted[place] = self._accepted[place] * kept + right

    def fade(self) -> None:
        """What was seen is long ago: it counts for little from now on."""
        self._tried = [tried * self.FADED for tried in self._tried]
        self._accepted = [accepted * self.FADED for accepted in self._accepted]

    def chance(self, position: int) -> float:
        """Of the candidate at this position, from 1 on, given those before it.

        It leans on the mean of all positions, and that on the prior.
        """
        return self.chances(position)[-1]

    @property
    def mean(self) -> float:
        """Of all positions together."""
        prior = self._prior.mean if isinstance(self._prior, Acceptance) else self._prior
        weight = self._prior_weight
        return (sum(self._accepted) + weight * prior) / (sum(self._tried) + weight)

    def chances(self, count: int) -> tuple[float, ...]:
        """Of positions 1 to `count`."""
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
    """What the controller keeps of one sequence.

    `limit`: the most candidates that the request allows. `level`: how its acceptance compares with
    what is usual (cohorts.py). `promised`: forecast tokens in the time of one step. `patience`:
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
    choice: Choice = Choice.CHAIN
    policy: LookaheadPolicy = field(default_factory=lambda: Choice.CHAIN.policy)
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
        self.choice, self.policy = Choice.OFF, RESTING
        self.promised = 1.0
        self.trying, self.verdicts = False, 0

    def try_out(self, window: int) -> None:
        """Draft for a few steps with `window` candidates a path, to measure acceptance."""
        self.follow(Choice.CHAIN)
        self.window = min(self.limit, window * self.branches)
        self.promised = 0.0
        self.trying, self.verdicts = True, 0
        self.acceptance.fade()
        self.tried_from = self.acceptance.candidates

    @property
    def asks_for_trees(self) -> bool:
        """Whether any right candidate at a position counts, not the first one alone."""
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
