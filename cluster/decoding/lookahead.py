"""The interface of a lookahead policy: what it sees, what it answers, what it needs.

A policy is a pure function of what the scheduler knows of one sequence. It returns grants and
windows. Drafters know nothing of policies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from workers.verification.rule import rule_named


class DraftView(Protocol):
    """What a policy sees of a sequence. Counts are tokens, times are of the driver's clock."""

    @property
    def num_candidates(self) -> int:
        """Candidates that a step could verify, at most `window` of them."""

    @property
    def in_flight(self) -> int:
        """Candidates that are being verified."""

    @property
    def kept(self) -> int:
        """Candidates that the last verdict left."""

    @property
    def window(self) -> int:
        """The most candidates that a step verifies."""

    @property
    def is_tree(self) -> bool:
        """Whether a window may have several candidates at one position."""

    @property
    def useful_candidates(self) -> int:
        """The most candidates on one path that can be of use."""

    @property
    def num_drafters(self) -> int:
        """Drafters that share the sequence."""

    @property
    def ready_since(self) -> float:
        """When the next step could have begun."""

    @property
    def is_coupled(self) -> bool:
        """Whether drafts are compared with the target's own tokens; else coins are tossed."""

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
        """Whether one of several groups is verifying a window of the sequence."""

    @property
    def waits_in_vain(self) -> bool:
        """Whether no more candidates will come before the next verdict."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do not step yet.

    `until`: when to step at the latest, by the driver's clock. math.inf: once an event arrives that
    is under way in any case.
    """

    until: float = math.inf


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy asks of a request and of the layout.

    `drafters`, `groups`: the fewest drafters and target groups. `no_draft_probs`: a rule that needs
    no draft probabilities, whose verdicts a drafter can foresee. `shared_noise`: a rule under which
    the target's own token decides.
    """

    chains_only: bool = False
    no_draft_probs: bool = False
    shared_noise: bool = False
    drafters: int = 0
    groups: int = 1

    def serve(self, rule: str) -> bool:
        """Whether the policy works with the rule of this name."""
        facts = rule_named(rule)
        if self.shared_noise and not facts.shares_noise:
            return False
        return not (self.no_draft_probs and facts.needs_draft_probs)


class LookaheadPolicy(Protocol):
    """One way to use the time while the target or the drafter works."""

    needs: Needs

    drafts: bool
    """Whether a drafter is wanted."""

    drafting_is_free: bool
    """Whether the drafter works while the target is busy anyway."""

    waits: bool
    """Whether a sequence may miss a step to wait for its drafter."""

    grants_by_step: bool
    """Whether a grant depends on the window being verified, so that each step brings a new one."""

    spreads: bool
    """Whether several drafters may work for one sequence, and work moves between them."""

    fans_out: bool
    """Whether branches for other outcomes are held. A step verifies the chain of first ones."""

    replicates: bool
    """Whether several target groups may verify one sequence."""

    def granted_candidates(self, view: DraftView) -> int:
        """The most candidates beyond the committed tokens, not counting branches."""

    def granted_branches(self, view: DraftView) -> int:
        """The most branches beside the chain (drafting.proto, Grant.fan_out)."""

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """How many candidates a step that starts now verifies, or until when to wait."""


class NoBranches:
    """Defaults of a policy that holds no branches."""

    fans_out = False
    spreads = False
    replicates = False

    def granted_branches(self, view: DraftView) -> int:
        """Always 0."""
        return 0
