"""Lookahead policies: how far a drafter may draft, and whether the target steps now."""

from __future__ import annotations

import enum

from cluster.decoding.lookahead import DraftView, LookaheadPolicy, Needs, NoBranches, Wait
from paceline.rules import MAX_WINDOW, Rule

MOST_CHAINS = 64
"""Chains and branches that a drafter grows at most in a pass, for all its sequences. Each is a
proposal a pass, which the driver reads and the pass computes: with many sequences at once that
costs more than branches bring (docs/policies.md).
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
    """Plain decoding."""

    needs = Needs()
    drafts = False
    drafting_is_free = False
    waits = False
    grants_by_step = False

    def granted_candidates(self, view: DraftView) -> int:
        """None."""
        return 0

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """Always step, without candidates."""
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
        """One window, which is spent once it is drafted."""
        return view.window

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """A full window, or what is there when no more will come or the wait is over."""
        full = min(view.window, view.useful_candidates)
        if view.is_tree and full > 0:
            full = view.window  # Beside one another, more than fit on a path are of use.
        return _await_candidates(view, full, now, wait_seconds)


class Pearl(NoBranches):
    """Draft the next window while this one is verified (PEARL, Liu et al. 2024).

    Phases of a step and as many drafts as fit beside it. Post-verify: a whole window is verified
    while the next is drafted, the first token of which is compared with the one that the target
    adds. Pre-verify, where nothing is left of what was drafted: the target steps with the first
    token alone while the rest of the window is drafted. Under the coupled rule the first token need
    not be there to be compared, so that step begins at once; under rules that toss coins it must be
    drafted before its coin can be tossed, so that step waits for it.

    Exact by what the scheduler does with the token that a verdict adds: under the coupled rule it
    is always taken and the run-ahead stays where it agrees; under the others it is given up where
    run-ahead is pending, whose first token is then verified with a coin of its own (verdicts.py).
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
        """A whole window after a verdict that left run-ahead, else the first token."""
        full = min(self._full(view), view.useful_candidates)
        if view.kept:
            return _await_candidates(view, full, now, wait_seconds)
        if view.is_coupled:
            return min(view.num_candidates, full)
        return _await_candidates(view, min(1, full), now, wait_seconds)

    def _full(self, view: DraftView) -> int:
        """The candidates of a window: with the token after it, as many as are drafted in a step."""
        if not view.pace:
            return view.window
        return max(1, min(view.window, round(view.pace) - 1))


class Chain(NoBranches):
    """The drafter keeps drafting; the target takes what has arrived and never waits."""

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
    """Positions of a chain's grant that may fork (FanOut.granted_branches).

    `pace`: passes in the time of a step, 0: not to be looked at. `crowd`: sequences of the drafter.
    """
    if pace:
        granted = min(granted, max(2, round(2 * pace)))
    return min(granted, max(0, MOST_CHAINS // crowd - 1))


class FanOut(Chain):
    """As chain, and the drafter also drafts for the likeliest other outcomes.

    It sends these branches ahead. At a verdict the driver goes on with the branch that continues
    it, where one does; a miss is an ordinary chain. (After SSD, Kumar et al. 2026, whose drafter
    answers when it has the outcome.)
    """

    needs = Needs(rules=frozenset({Rule.COUPLED, Rule.ONE_HOT}))
    fans_out = True

    def granted_branches(self, view: DraftView) -> int:
        """As many as there are positions that may fork in the grant; with several drafters, twice.

        The first of them draws the likelier half, as it would alone, for what it has not begun it
        lacks where the verdict goes that way. Of more than twice as many none is likely, but the
        driver must place a token of each in every pass.

        Of a chain it reaches no more of them than it has passes in two steps: a slow drafter, or
        one that branches make slow, gets fewer. And the chains of all its sequences with their
        branches are no more than MOST_CHAINS together.
        """
        if not view.useful_candidates:
            return 0
        pace = 0.0 if view.is_tree else view.pace
        forks = forks_within(self.granted_candidates(view), pace=pace, crowd=view.crowd)
        return forks * min(2, max(1, view.num_drafters))


class Spread(FanOut):
    """As fanout, with several drafters.

    Sequences are balanced between them. Where there are more drafters than sequences, several work
    for one: all draft the chain, and each a share of the branches; drafters of different kinds
    differ in the chain too. Work leaves a drafter that is lost, silent, or much slower than others.
    """

    needs = Needs(rules=frozenset({Rule.COUPLED, Rule.ONE_HOT}), drafters=2)
    spreads = True


class Replicas(FanOut):
    """As fanout, and several target groups verify one sequence (DSI, Timor et al. 2024).

    While one group is at a window, another begins with the next, as if the first were accepted. It
    begins when as much is new as is drafted in a group's share of a step, so that their verdicts
    come at even intervals. Each step holds all candidates from the last committed token on
    (replicas.py).
    """

    needs = Needs(chains_only=True, rules=frozenset({Rule.COUPLED}), groups=2)
    replicates = True

    def granted_candidates(self, view: DraftView) -> int:
        """A window of each group, the token after it, and one window more."""
        return view.num_groups * (view.window + 1) + view.window

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """Whatever is there while nobody verifies; else what others verify and enough more."""
        if not view.verifying:
            return min(view.num_candidates, view.window)
        most = min(view.in_flight + 1 + view.window, MAX_WINDOW)
        new = min(view.num_candidates, most) - view.in_flight
        share = max(1, min(view.window, round(view.pace / view.num_groups)))
        enough = 1 if view.waits_in_vain else share
        return view.in_flight + new if new >= enough else Wait()


def _await_candidates(view: DraftView, full: int, now: float, wait_seconds: float) -> int | Wait:
    """`full` candidates, or what is there when no more will come or the wait is over."""
    give_up_at = view.ready_since + wait_seconds
    if view.num_candidates >= full or view.waits_in_vain or now >= give_up_at:
        return min(view.num_candidates, full)
    return Wait(give_up_at)


class Auto(Chain):
    """What a sequence of `auto` begins with, until the controller (auto.py) has chosen.

    `waits` and `fans_out`, as what the controller may choose.
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
    """The policy of that name; policies hold no state and are shared."""
    return _POLICIES[name]
