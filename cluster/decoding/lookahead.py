"""What a lookahead policy is: what it looks at, what it answers, what it asks of a layout.

A policy is a pure function of what the scheduler knows of one sequence. It gives grants and
windows; drafters know nothing of policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from paceline.rules import Rule
from paceline.value import value_class


@value_class(frozen=True, slots=True)
class DraftView:
    """What a policy may look at. Counts are tokens, `ready_since` is the driver's clock.

    `num_candidates` are those that a step could verify, up to `window` of them. No more than
    `useful_candidates` on one path can be of use. `in_flight` of the candidates are being verified;
    the last verdict left `kept` of them.
    `num_groups` of the target serve the sequence; `verifying`: one of them is at a step of it.
    `is_coupled`: drafts are compared with the target's own tokens, else coins are tossed for them.
    `pace`: passes of the drafter in the time of a step; 0: not known yet. `crowd`: sequences that
    the drafter drafts for, this one included.
    """

    num_candidates: int
    in_flight: int
    kept: int
    window: int
    is_tree: bool
    useful_candidates: int
    has_drafter: bool
    num_drafters: int
    draft_exhausted: bool
    ready_since: float
    is_coupled: bool
    pace: float
    crowd: int
    num_groups: int = 1
    verifying: bool = False

    @property
    def waits_in_vain(self) -> bool:
        """Nothing more will come before the next verdict."""
        return self.draft_exhausted or not self.has_drafter


@dataclass(frozen=True, slots=True)
class Wait:
    """Do not step yet, and not for want of anything beyond this time.

    Without a time: until something happens that is under way in any case.
    """

    until: float = math.inf


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy asks of a request and of the layout.

    `drafters`, `groups` of the target: the fewest.
    """

    chains_only: bool = False
    rules: frozenset[Rule] = frozenset(Rule)
    drafters: int = 0
    groups: int = 1


class LookaheadPolicy(Protocol):
    """One way to use the time while the target or the drafter works."""

    needs: Needs

    drafts: bool
    """Whether a drafter is wanted at all."""

    drafting_is_free: bool
    """Whether the drafter works while the target is busy anyway."""

    waits: bool
    """Whether a sequence may be held back from a step for its drafter's sake."""

    grants_by_step: bool
    """Whether a grant depends on what is being verified, so that each step brings a new one."""

    spreads: bool
    """Whether several drafters may work for one sequence, and work moves between them."""

    fans_out: bool
    """Whether branches for other outcomes are held, of which a step verifies the first alone."""

    replicates: bool
    """Whether several target groups may verify one sequence."""

    def granted_candidates(self, view: DraftView) -> int:
        """How many candidates beyond the committed tokens there may be, branches left out."""

    def granted_branches(self, view: DraftView) -> int:
        """How many branches beside them (drafting.proto, Grant.fan_out)."""

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """How many candidates a step that starts now verifies, or until when to wait."""


class NoBranches:
    """Of a policy that has all that it holds verified."""

    fans_out = False
    spreads = False
    replicates = False

    def granted_branches(self, view: DraftView) -> int:
        """None."""
        return 0
