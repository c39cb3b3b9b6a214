"""Lookahead policies: which grants a drafter gets, and when the target may step."""

from __future__ import annotations

import enum


class PolicyName(enum.Enum):
    """The policies of this version."""

    OFF = "off"
    LOCKSTEP = "lockstep"
    CHAIN = "chain"
