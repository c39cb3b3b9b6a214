"""Lookahead policies: how far a drafter may draft, and whether the target steps now."""

from __future__ import annotations

import enum

from cluster.decoding.lookahead import DraftView, LookaheadPolicy, Needs, NoBranches, Wait
from paceline.rules import MAX_WINDOW

MOST_CHAINS = 64
"""Upper bound on the chains and branches that a drafter grows in a pass, over all its sequences.
Each costs the drafter a node and the driver a proposal. With many sequences at a time this costs
more than branches bring (docs/policies.md).
"""


class PolicyName(enum.Enum):
    """The policies of this version."""

    OFF = "off"
    LOCKSTEP = "lockstep"
    PEARL = "pearl"
    CHAIN = "chain"
    FANOUT = "fanout"
    SPREAD = "spread"
    REPLICAS = "replicas"
    AUTO = "auto"


class Off(NoBranches):
    """Plain decoding: no drafter, no candidates."""

    needs = Needs()
    drafts = False
    drafting_is_free = False
    waits = False
    grants_by_step = False

    def granted_candidates(self, view: DraftView) -> int:
        """Always 0."""
        return 0

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """Always 0: step at once, without candidates."""
        return 0


class Lockstep(NoBranches):
    """Speculative decoding as published (Leviathan et al. 2023): draft a window, verify, repeat.

    The drafter rests while the target works, and the target waits for a full window, at most
    `wait_seconds`.
    """

    needs = Needs()
    drafts = True
    drafting_is_free = False
    waits = True
    grants_by_step = False

    def granted_candidates(self, view: DraftView) -> int:
        """One window. The grant is spent once the window is drafted."""
        return view.window

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """A full window, or what is there if no more will come or the wait is over."""
        full = min(view.window, view.useful_candidates)
        if view.is_tree and full > 0:
            full = view.window  # Side by side, more candidates are useful than fit on one path.
        return _await_candidates(view, full, now, wait_seconds)


class Pearl(NoBranches):
    """Draft the next window while this one is verified (PEARL, Liu et al. 2024, arXiv 2408.11850).

    There are two kinds of steps. Post-verify: the target verifies a whole window while the drafter
    drafts the next one. The first token of the next window is compared with the one that the target
    adds. Pre-verify, after a verdict that left no candidates: the target verifies the first token
    of a window while the drafter drafts the rest. Under the coupled rule that token need not be
    there to be compared, so the step begins at once. Rules that toss coins need the token before
    its coin is tossed, so the step waits for it.

    What keeps the text or its law is how the scheduler treats the token that a verdict adds. Under
    the coupled rule it is always taken, and the run-ahead stays if it agrees. Under the others it
    is given up if run-ahead is pending, whose first token gets a coin of its own (verdicts.py).
    """

    needs = Needs(chains_only=True)
    drafts = True
    drafting_is_free = True
    waits = True
    grants_by_step = True

    def granted_candidates(self, view: DraftView) -> int:
        """The window being verified, the token after it, and the window of the next step."""
        return view.in_flight + 1 + self._full(view)

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """A whole window if the last verdict left run-ahead, else only the first token."""
        full = min(self._full(view), view.useful_candidates)
        if view.kept:
            return _await_candidates(view, full, now, wait_seconds)
        if view.is_coupled:
            return min(view.num_candidates, full)
        return _await_candidates(view, min(1, full), now, wait_seconds)

    def _full(self, view: DraftView) -> int:
        """Candidates of a window: with the token after it, as many as are drafted in one step."""
        if not view.pace:
            return view.window
        return max(1, min(view.window, round(view.pace) - 1))


class Chain(NoBranches):
    """The drafter keeps drafting. The target takes what has arrived and never waits."""

    needs = Needs()
    drafts = True
    drafting_is_free = True
    waits = False
    grants_by_step = False

    def granted_candidates(self, view: DraftView) -> int:
        """The window being verified, the token after it, and one window more."""
        return 2 * view.window + 1

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """Whatever is there, up to a window."""
        return min(view.num_candidates, view.window)


def forks_within(granted: int, *, pace: float, crowd: int) -> int:
    """How many positions of a chain may have branches beside them, given the chain's grant.

    `granted`: candidates that the chain may have. `pace`: the drafter's passes in the time of a
    step; 0: do not bound by it. `crowd`: sequences of the drafter, which share MOST_CHAINS.
    """
    if pace:
        granted = min(granted, max(2, round(2 * pace)))
    return min(granted, max(0, MOST_CHAINS // crowd - 1))


class FanOut(Chain):
    """As chain, and the drafter also drafts for the likeliest other outcomes, in branches.

    Branches are sent ahead of the verdict. If one continues the verdict, the driver goes on with
    it; a miss continues with an ordinary chain. (After SSD, Kumar et al. 2026, whose drafter
    answers once it has the outcome.)
    """

    needs = Needs(no_draft_probs=True)
    fans_out = True

    def granted_branches(self, view: DraftView) -> int:
        """One for each position that may fork; twice as many if several drafters share them.

        The first drafter draws the likelier half, as it would alone: a branch that it has not begun
        is missing when the verdict goes there. More than twice as many would bring little, and the
        driver places a token of each in every pass.

        A chain forks at most at as many positions as the drafter makes passes in two steps, so a
        slow drafter gets fewer branches. MOST_CHAINS bounds all chains and branches of a drafter.
        """
        if not view.useful_candidates:
            return 0
        pace = 0.0 if view.is_tree else view.pace
        forks = forks_within(self.granted_candidates(view), pace=pace, crowd=view.crowd)
        return forks * min(2, max(1, view.num_drafters))


class Spread(FanOut):
    """As fanout, with several drafters.

    Sequences are balanced between drafters. If there are more drafters than sequences, several work
    for one: all draft the chain, and each draws a share of the branches. Drafters of different
    kinds differ in the chain too. Work leaves a drafter that is lost, silent, or much slower than
    others.
    """

    needs = Needs(no_draft_probs=True, drafters=2)
    spreads = True


class Replicas(FanOut):
    """As fanout, and several target groups verify one sequence (DSI, Timor et al. 2024).

    While one group verifies a window, another begins with the next, as if the first were accepted.
    It begins once as much is new as the drafter makes in a group's share of a step, so verdicts
    come at even intervals. Each step holds all candidates from the last committed token on
    (replicas.py).
    """

    needs = Needs(chains_only=True, shared_noise=True, groups=2)
    replicates = True

    def granted_candidates(self, view: DraftView) -> int:
        """A window of each group, the token after it, and one window more."""
        return view.num_groups * (view.window + 1) + view.window

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """Whatever is there if no group verifies; else what others verify and enough more."""
        if not view.verifying:
            return min(view.num_candidates, view.window)
        most = min(view.in_flight + 1 + view.window, MAX_WINDOW)
        new = min(view.num_candidates, most) - view.in_flight
        share = max(1, min(view.window, round(view.pace / view.num_groups)))
        enough = 1 if view.waits_in_vain else share
        return view.in_flight + new if new >= enough else Wait()


def _await_candidates(view: DraftView, full: int, now: float, wait_seconds: float) -> int | Wait:
    """`full` candidates, or what is there if no more will come or the wait is over."""
    give_up_at = view.ready_since + wait_seconds
    if view.num_candidates >= full or view.waits_in_vain or now >= give_up_at:
        return min(view.num_candidates, full)
    return Wait(give_up_at)


class Auto(Chain):
    """The policy of an `auto` sequence until the controller (auto.py) has chosen one.

    `waits` and `fans_out` are true because the controller may choose policies that do.
    """

    waits = True
    fans_out = True


_POLICIES: dict[PolicyName, LookaheadPolicy] = {
    PolicyName.OFF: Off(),
    PolicyName.LOCKSTEP: Lockstep(),
    PolicyName.PEARL: Pearl(),
    PolicyName.CHAIN: Chain(),
    PolicyName.FANOUT: FanOut(),
    PolicyName.SPREAD: Spread(),
    PolicyName.REPLICAS: Replicas(),
    PolicyName.AUTO: Auto(),
}


def policy_named(name: PolicyName) -> LookaheadPolicy:
    """The policy of that name. Policies hold no state and are shared."""
    return _POLICIES[name]
