"""The choices of the `auto` controller (auto.py): a policy, and whether steps verify trees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cluster.decoding.lookahead import POLICIES, LookaheadPolicy
from cluster.decoding.policies import chain, fanout, off
from paceline.rules import Rule

TREE_WIDTH = 2
"""Candidates at one position of a tree. A drafter's second guess is right far more often than its
third, and with more branches each gets fewer candidates."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A policy, with or without trees. There is one of each (`choice_of`).

    `name`: in the statistics. `width`: candidates that a step verifies at one position. If it is
    above 1, a step verifies the chain and the likeliest of what is held for other outcomes. Where
    nothing is (`chain`, and `fanout` in a large batch), the drafter grows a tree instead.
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

    def allowed(self, rule: Rule, *, branches: int, merge: bool) -> bool:
        """Whether a request with this rule, these branches and merged drafters or not can have it.

        The trees of a choice need the coupled rule. Requests with branches or merged drafters
        verify trees under every policy, so they cannot have these.
        """
        needs = self.policy.needs
        if merge and not needs.allow_merging:
            return False
        if self.is_tree and (branches > 1 or merge or rule is not Rule.COUPLED):
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
