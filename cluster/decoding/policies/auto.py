"""A controller (cluster/decoding/auto) chooses policy and window for each sequence."""

from __future__ import annotations

from cluster.decoding.lookahead import POLICIES
from cluster.decoding.policies.chain import Chain


class Auto(Chain):
    """The policy of an `auto` sequence until the controller has chosen one.

    `waits` and `fans_out` are true because the controller may choose policies that do.
    """

    name = "auto"
    help = "the server chooses policy and window for each sequence, and may change them"
    adapts = True
    waits = True
    fans_out = True
    place_in_auto = None


AUTO = POLICIES.add(Auto())
