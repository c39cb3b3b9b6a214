"""Registers `auto`, which decides nothing itself: cluster/decoding/auto does."""

from __future__ import annotations

from cluster.decoding.policies.chain import Chain
from cluster.decoding.policy import POLICIES


class Auto(Chain):
    """The policy of an `auto` sequence until one is chosen.

    `waits` and `fans_out` are true because policies that do may be chosen.
    """

    name = "auto"
    help = "the server chooses policy and window for each sequence, and may change them"
    adapts = True
    waits = True
    fans_out = True
    place_in_auto = None


AUTO = POLICIES.add(Auto())
