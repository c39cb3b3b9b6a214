"""What the controller of `auto` (auto.py) may choose: a policy, and whether steps verify trees."""

from __future__ import annotations

import enum

from cluster.decoding.lookahead import LookaheadPolicy
from cluster.decoding.policies import PolicyName, policy_named
from paceline.rules import Rule

TREE_WIDTH = 2
"""Candidates beside each other in a tree. A drafter's second guess is right far more often than its
third, and more branches leave fewer candidates to each."""


class Choice(enum.Enum):
    """A policy; the value is its name in the statistics.

    `named`: as requests name it. `width`: candidates beside each other that a step verifies. More
    than 1: of what is held for other outcomes the likeliest is verified together with the chain;
    where nothing is (`chain`, and `fanout` in a large batch), the drafter grows a tree to that end.
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
        """A member: what is told of it, the policy, its width."""
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
        """Whether steps verify candidates beside each other."""
        return self.width > 1

    def allowed(self, rule: Rule, *, branches: int, merge: bool) -> bool:
        """Whether a request of this rule can have it, with so many branches or merged drafters.

        Candidates stand beside each other already where the request asks for branches; where coins
        are tossed, drafters that know another guess than their first do not draft.
        """
        needs = self.policy.needs
        if merge and (needs.chains_only or needs.drafters > 1):
            return False
        if self.is_tree and (branches > 1 or merge or rule is not Rule.COUPLED):
            return False
        return rule in needs.rules and not (needs.chains_only and branches > 1)
