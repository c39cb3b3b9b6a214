"""Lookahead policies: how far a drafter may draft, and whether the target steps now.

A policy is a pure function of what the scheduler knows of one sequence. It gives grants and
windows; drafters know nothing of policies.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol


class PolicyName(enum.Enum):
    """The policies of this version."""

    OFF = "off"
    LOCKSTEP = "lockstep"
    CHAIN = "chain"


@dataclass(frozen=True, slots=True)
class DraftView:
    """What a policy may look at. Counts are tokens, `ready_since` is the driver's clock.

    `window` bounds the candidates of a step; no more than `useful_candidates` on one path can be
    of use.
    """

    num_candidates: int
    window: int
    is_tree: bool
    useful_candidates: int
    has_drafter: bool
    draft_exhausted: bool
    ready_since: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Do not step yet, and not for want of anything beyond this time."""

    until: float


class LookaheadPolicy(Protocol):
    """One way to use the time while the target or the drafter works."""

    drafts: bool
    """Whether a drafter is wanted at all."""

    drafting_is_free: bool
    """Whether the drafter works while the target is busy anyway."""

    def granted_candidates(self, view: DraftView) -> int:
        """How many candidates beyond the committed tokens there may be."""

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """How many candidates a step that starts now verifies, or until when to wait."""


class Off:
    """Plain decoding."""

    drafts = False
    drafting_is_free = False

    def granted_candidates(self, view: DraftView) -> int:
        """None."""
        return 0

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """Always step, without candidates."""
        return 0


class Lockstep:
    """Speculative decoding as published (Leviathan et al. 2023): draft a window, verify, repeat.

    The drafter rests while the target works, and the target waits for a full window, at most
    `wait_seconds`.
    """

    drafts = True
    drafting_is_free = False

    def granted_candidates(self, view: DraftView) -> int:
        """One window, which is spent once it is drafted."""
        return view.window

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """A full window, or what is there when no more will come or the wait is over."""
        full = min(view.window, view.useful_candidates)
        if view.is_tree and full > 0:
            full = view.window  # Beside one another, more than fit on a path are of use.
        give_up_at = view.ready_since + wait_seconds
        if (
            view.num_candidates >= full
            or view.draft_exhausted
            or not view.has_drafter
            or now >= give_up_at
        ):
            return min(view.num_candidates, full)
        return Wait(give_up_at)


class Chain:
    """The drafter keeps drafting; the target takes what has arrived and never waits."""

    drafts = True
    drafting_is_free = True

    def granted_candidates(self, view: DraftView) -> int:
        """The window being verified, the token after it, and one window more."""
        return 2 * view.window + 1

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """Whatever is there, up to a window."""
        return min(view.num_candidates, view.window)


_POLICIES: dict[PolicyName, LookaheadPolicy] = {
    PolicyName.OFF: Off(),
    PolicyName.LOCKSTEP: Lockstep(),
    PolicyName.CHAIN: Chain(),
}


def policy_named(name: PolicyName) -> LookaheadPolicy:
    """The policy of that name; policies hold no state and are shared."""
    return _POLICIES[name]
