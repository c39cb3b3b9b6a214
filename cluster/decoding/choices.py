"""The choices of the `auto` controller (auto.py): a policy, and whether steps verify trees."""

from __future__ import annotations

import enum

from cluster.decoding.lookahead import LookaheadPolicy
from cluster.decoding.policies import PolicyName, policy_named
from workers.verification.rule import rule_named

TREE_WIDTH = 2
"""Candidates at one position of a tree. A drafter's second guess is right far more often than its
third, and with more branches each gets fewer candidates."""


class Choice(enum.Enum):
    """A policy, with or without trees. The value is its name in the statistics.

    `named`: the policy's name in requests. `width`: candidates that a step verifies at one
    position. If it is above 1, a step verifies the chain and the likeliest of what is held for
    other outcomes. Where nothing is (`chain`, and `fanout` in a large batch), the drafter grows a
    tree instead.
    """

    OFF = "off", PolicyName.OFF
    LOCKSTEP = "lockstep", PolicyName.LOCKSTEP
    PEARL = "pearl", PolicyName.PEARL
    CHAIN = "chain", PolicyName.CHAIN
    CHAIN_TREE = "chain-tree", PolicyName.CHAIN, TREE_WIDTH
    FANOUT = "fanout", PolicyName.FANOUT
    FANOUT_TREE = "fanout-tree", PolicyName.FANOUT, TREE_WIDTH
    SPREAD = "spread", PolicyName.SPREAD
    SPREAD_TREE = "spread-tree", PolicyName.SPREAD, TREE_WIDTH
    REPLICAS = "replicas", PolicyName.REPLICAS

    named: PolicyName
    width: int

    def __new__(cls, value: str, named: PolicyName, width: int = 1) -> Choice:
        """Make a member. `value`: its name in the statistics."""
        made = object.__new__(cls)
        made._value_ = value
        made.named, made.width = named, width
        return made

    @property
    def policy(self) -> LookaheadPolicy:
        """The policy itself."""
        return policy_named(self.named)

    @property
    def is_tree(self) -> bool:
        """Whether steps verify several candidates at a position."""
        return self.width > 1

    def allowed(self, rule: str, *, branches: int, merge: bool) -> bool:
        """Whether a request with this rule, these branches and merged drafters or not can have it.

        The trees of a choice need the coupled rule. Requests with branches or merged drafters
        verify trees under every policy, so they cannot have these.
        """
        needs = self.policy.needs
        if merge and (needs.chains_only or needs.drafters > 1):
            return False
        if self.is_tree and (branches > 1 or merge or not rule_named(rule).shares_noise):
            return False
        return needs.serve(rule) and not (needs.chains_only and branches > 1)
