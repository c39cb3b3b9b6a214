"""What the controller of `auto` (auto.py) keeps of a sequence, and of a policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.decoding.estimates import Acceptance
from cluster.decoding.events import Request
from cluster.decoding.policies import LookaheadPolicy, Off, PolicyName, policy_named
from paceline.rules import Rule

FIRST_GUESS = 0.7
"""Acceptance of a drafter of which nothing is known."""

FIRST_PROBE, LAST_PROBE = 16, 512
"""Plain verdicts before a probe; twice as many after each that failed, up to the last."""

FIRST_WINDOW = 4
"""Candidates a step on a path before anything is known."""

_RECENT = 0.98
_TRUST = 40.0
"""A forecast is corrected fully after many more tokens than this."""
_FORGET = 0.002


class Resting(Off):
    """Plain decoding with a drafter at hand, which hears what is committed."""

    drafts = True


RESTING = Resting()


@dataclass(slots=True)
class Pilot:
    """What the controller keeps of one sequence.

    `limit`: most candidates that the request allows. `restarted_at`: when the last verdict left it
    without candidates, until the first new one. `promised`: tokens in the time of a step.
    `patience`: seconds that a policy which waits may wait. Verdict counts are since the last
    choice, change or probe.
    """

    limit: int
    branches: int
    rule: Rule
    merge: bool = False
    drafter: str | None = None
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(FIRST_GUESS))
    choice: PolicyName = PolicyName.CHAIN
    policy: LookaheadPolicy = field(default_factory=lambda: policy_named(PolicyName.CHAIN))
    window: int = 1
    last_window: int = 0
    promised: float = 0.0
    patience: float = math.inf
    restarted_at: float | None = None
    last_verdict_at: float | None = None
    verdicts: int = 0
    probing: bool = False
    probed_from: int = 0
    probe_after: int = FIRST_PROBE
    choices: dict[str, int] = field(default_factory=dict)
    estimates: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> Pilot:
        """Of a sequence that begins."""
        window = min(request.window, FIRST_WINDOW * request.branches)
        return cls(
            limit=request.window,
            branches=request.branches,
            rule=request.spec.rule,
            merge=request.merge,
            window=window,
        )

    def allows(self, name: PolicyName) -> bool:
        """Whether the request can have this policy."""
        needs = policy_named(name).needs
        if self.merge and (needs.chains_only or needs.drafters > 1):
            return False
        return self.rule in needs.rules and not (needs.chains_only and self.branches > 1)


@dataclass(slots=True)
class Correction:
    """What a policy brought over what had been forecast, recent verdicts first."""

    brought: float = _TRUST
    forecast: float = _TRUST

    def add(self, brought: float, forecast: float) -> None:
        self.brought = self.brought * _RECENT + brought
        self.forecast = self.forecast * _RECENT + forecast

    def forget(self) -> None:
        """Believe the forecast a little more again."""
        self.brought += _FORGET * (self.forecast - self.brought)

    @property
    def factor(self) -> float:
        return self.brought / self.forecast
