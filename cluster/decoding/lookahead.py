"""What a lookahead policy is: what it looks at, what it answers, what it asks of a layout.

A policy is a pure function of what the scheduler knows of one sequence. It gives grants and
windows; drafters know nothing of policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from paceline.rules import Rule


class DraftView(Protocol):
    """What a policy may look at. Counts are tokens, times the driver's clock."""

    @property
    def num_candidates(self) -> int:
        """Those that a step could verify, up to `window` of them."""

    @property
    def in_flight(self) -> int:
        """Of the candidates so many are being verified."""

    @property
    def kept(self) -> int:
        """The last verdict left so many."""

    @property
    def window(self) -> int:
        """The most that a step verifies."""

    @property
    def is_tree(self) -> bool:
        """Whether several may stand side by side."""

    @property
    def useful_candidates(self) -> int:
        """No more than so many on one path can be of use."""

    @property
    def num_drafters(self) -> int:
        """Drafters that share the sequence."""

    @property
    def ready_since(self) -> float:
        """Since when the next step could begin."""

    @property
    def is_coupled(self) -> bool:
        """Drafts are compared with the target's own tokens; else coins are tossed for them."""

    @property
    def pace(self) -> float:
        """Passes of the drafter in the time of a step; 0: not known yet."""

    @property
    def crowd(self) -> int:
        """Sequences that the drafter drafts for, this one included."""

    @property
    def num_groups(self) -> int:
        """Groups of the target that serve the sequence."""

    @property
    def verifying(self) -> bool:
        """Whether one of several groups is at a step of it."""

    @property
    def waits_in_vain(self) -> bool:
        """Nothing more will come before the next verdict."""


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
