"""What `auto` can choose, and the pilot of a sequence: what it may have and how its drafts fare."""

from __future__ import annotations

import math
from collections.abc import Mapping
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

FIRST_WINDOW = 4
"""Candidates on a path that a step verifies while nothing is known of a drafter."""

FIRST_GUESS = 0.7
"""Acceptance assumed for a drafter before anything is observed."""

_LEANING = 8.0
"""Weight of the prior of a sequence's acceptance, in tried candidates. The prior is the acceptance
of its drafter."""

_LONG = 16
"""A drafter needs passes of its own to read a prompt of more tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A policy, with or without trees. There is one of each (`choice_of`).

    `name`: in the statistics. `width`: candidates that a step verifies at one position. If it is
    above 1, a step verifies the chain and the likeliest candidates held for other outcomes.
    """

    name: str
    policy: LookaheadPolicy
    width: int

    @property
    def is_tree(self) -> bool:
        """Whether steps verify several candidates at a position."""
        return self.width > 1


@cache
def choice_of(policy: LookaheadPolicy, width: int = 1) -> Choice:
    """The choice of a policy, with trees if `width` is above 1."""
    return Choice(policy.name if width == 1 else f"{policy.name}-tree", policy, width)


OFF, CHAIN, FANOUT = choice_of(off.OFF), choice_of(chain.CHAIN), choice_of(fanout.FANOUT)


@cache
def drafting_choices() -> tuple[Choice, ...]:
    """The choices among which `auto` chooses if it drafts, in the order of their places.

    A policy with branches has trees too, unless it takes only chains.
    """
    found = []
    placed = [one for one in POLICIES.all().values() if one.place_in_auto is not None]
    for policy in sorted(placed, key=lambda one: one.place_in_auto or 0):
        found.append(choice_of(policy))
        if policy.fans_out and not policy.needs.chains_only:
            found.append(choice_of(policy, TREE_WIDTH))
    return tuple(found)


class Rate:
    """How often something is right. While few trials are known, it leans on `prior`."""

    __slots__ = ("_prior", "_prior_weight", "_right", "weight")

    DECAY = 0.99
    """The factor by which earlier trials shrink with each trial of a sequence."""

    def __init__(self, prior: Rate | float, *, prior_weight: float = 4.0) -> None:
        self._prior, self._prior_weight = prior, prior_weight
        self._right = 0.0
        self.weight = 0.0
        """Decayed number of trials."""

    def add(self, tried: int, right: int, *, of: int = 1) -> None:
        """Add trials of a verdict. `of`: sequences whose verdicts are all added here."""
        kept = 1 - (1 - self.DECAY) * tried / of
        self.weight = self.weight * kept + tried
        self._right = self._right * kept + right

    def doubt(self) -> None:
        """Have earlier trials count for no more than the prior, because they are old."""
        if self.weight > self._prior_weight:
            self._right *= self._prior_weight / self.weight
            self.weight = self._prior_weight

    @property
    def value(self) -> float:
        """The rate, from 0 to 1."""
        prior = self._prior.value if isinstance(self._prior, Rate) else self._prior
        weight = self._prior_weight
        return (self._right + weight * prior) / (self.weight + weight)


class Resting(Off):
    """Plain decoding with an assigned drafter, which is told what is committed."""

    drafts = True


RESTING = Resting()


@dataclass(slots=True)
class Pilot:
    """What is kept of one sequence with policy `auto`.

    `limit`: the most candidates that the request allows. `patience`: seconds that a waiting policy
    may wait. `restarted_at`: when a verdict left the sequence without candidates; None once new
    ones came. `cut_for`: verdicts since its drafts were cut. `trying`: verdicts that are left of
    a probe. `catches_up`: nothing came yet from a drafter that has to read a long prompt first, or
    what was committed during a rest.
    """

    limit: int
    branches: int
    rule: str
    merge: bool = False
    trees: bool = True
    drafter: str | None = None
    acceptance: Rate = field(default_factory=lambda: Rate(FIRST_GUESS))
    choice: Choice = CHAIN
    policy: LookaheadPolicy = CHAIN.policy
    window: int = 1
    patience: float = math.inf
    restarted_at: float | None = None
    cut_for: int = 0
    trying: int = 0
    catches_up: bool = False
    choices: dict[str, int] = field(default_factory=dict)
    told: Mapping[str, float] = field(default_factory=dict)
    """The estimates of the plan that it follows, as the statistics show them."""

    @classmethod
    def of(cls, request: Request) -> Pilot:
        """The pilot of a sequence that begins."""
        window = min(request.window, FIRST_WINDOW * request.branches)
        return cls(
            request.window,
            request.branches,
            request.spec.rule,
            request.merge,
            request.trees,
            window=window,
            catches_up=len(request.prompt_token_ids) > _LONG,
        )

    def meets(self, drafter: str, known: Rate) -> None:
        """Assign a drafter. `known`: the acceptance of everything that this drafter drafted."""
        self.drafter = drafter
        self.acceptance = Rate(known, prior_weight=_LEANING)

    @property
    def estimates(self) -> dict[str, float]:
        """What the statistics say of its choice (inference.proto, SpeculationStats.estimates)."""
        return {"acceptance": self.acceptance.value, **self.told} if self.told else {}

    @property
    def rests(self) -> bool:
        """Whether the sequence decodes plainly."""
        return self.policy is RESTING

    def rest(self) -> None:
        """Decode plainly from now on."""
        self.choice, self.policy = OFF, RESTING
        self.trying = 0

    def follow(self, choice: Choice, window: int) -> None:
        """Draft with `window` candidates from now on, by this choice or one that is allowed."""
        self.catches_up |= self.rests
        self.choice = choice if self.allows(choice) else CHAIN
        self.policy = self.choice.policy
        self.window = max(1, min(self.limit, max(window, self.branches)))

    def allows(self, choice: Choice) -> bool:
        """Whether the request can follow `choice`.

        The trees of a choice need the coupled rule. Requests with branches or merged drafters
        verify trees under every policy, so they cannot have these.
        """
        needs, branched = choice.policy.needs, self.branches > 1
        if choice.is_tree and (
            not self.trees or branched or self.merge or not rule_named(self.rule).shares_noise
        ):
            return False
        if (self.merge and not needs.allow_merging) or (branched and needs.chains_only):
            return False
        return needs.serve(self.rule)

    def trials(self, verdict: CountedVerdict) -> tuple[int, int]:
        """First candidates that a verdict looked at, and how many of them were right.

        Where the request asks for trees, any candidate of a position may be the right one.
        Candidates held for the position of the verdict's own token count as well.
        """
        if verdict.firsts is not None and not (self.branches > 1 or self.merge):
            tried, right = len(verdict.firsts), sum(verdict.firsts)
            judges_held = tried == verdict.accepted
        else:
            tried, right = verdict.tried, verdict.accepted
            judges_held = verdict.accepted == verdict.depth
        if judges_held and verdict.foresight is not Foresight.NOTHING:
            tried, right = tried + 1, right + (verdict.foresight is Foresight.FIRST)
        return tried, right
