"""Like fanout, with several drafters.

Sequences are balanced between drafters. If there are more drafters than sequences, several work for
one: all draft the chain, and each draws a share of the branches. Drafters of different kinds differ
in the chain too. Work leaves a drafter that is lost, silent, or much slower than others.
"""

from __future__ import annotations

from cluster.decoding.policies.fanout import FanOut
from cluster.decoding.policy import POLICIES, Needs


class Spread(FanOut):
    """A chain whose branches several drafters draw."""

    name = "spread"
    help = "as fanout, and several drafters share the work"
    paper = None
    needs = Needs(no_draft_probs=True, drafters=2)
    spreads = True
    place_in_auto = 50


SPREAD = POLICIES.add(Spread())
