"""Faults while a request is served whose law is enumerated (law_world.py).

Steps and passes are counted to fix beforehand when a fault comes. A fault that depended on a token
would itself change the law.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Way(enum.Enum):
    """How a drafter stops working for the sequence."""

    LOST = "lost"
    """Its stream breaks. Another drafter that is there takes over."""
    DECLINES = "declines"
    """It sends `Declined`. Another drafter that is there takes over."""
    RESTARTS = "restarts"
    """Its stream breaks, and it is back at once without any knowledge."""


@dataclass(frozen=True)
class TargetFault:
    """The target is lost while it computes step number `step`; the prompt's step is the first.

    `away`: passes whose drafts arrive before it is back. `drafter_too`: the drafter ends with the
    target, and starts again when the target is back. `verified`: the step was verified, and only
    its answer is lost.
    """

    step: int
    away: int = 0
    drafter_too: bool = False
    verified: bool = False

    def __str__(self) -> str:
        too = "-drafter-too" if self.drafter_too else ""
        verified = "-verified" if self.verified else ""
        return f"lost{self.step}away{self.away}{too}{verified}"


@dataclass(frozen=True)
class DrafterFault:
    """The sequence's drafter stops working for it, after `passes` passes during step `step`.

    `target_away`: the target is lost later in the same step.
    """

    step: int
    passes: int
    way: Way
    target_away: bool = False

    def __str__(self) -> str:
        too = "-target-too" if self.target_away else ""
        return f"{self.way.value}{self.step}after{self.passes}{too}"


@dataclass(frozen=True)
class Preemption:
    """An older sequence with plain decoding takes the KV blocks of the enumerated one.

    There are `num_blocks` blocks of one token each. The older sequence ends when it has all of
    them.
    """

    num_blocks: int

    def __str__(self) -> str:
        return f"preempted-of-{self.num_blocks}"


@dataclass(frozen=True)
class Pause:
    """The request is paused during step number `step`, and resumed after it."""

    step: int

    def __str__(self) -> str:
        return f"paused{self.step}"


@dataclass(frozen=True)
class BrokenStream:
    """The caller's stream breaks while step number `step` computes, and it resumes at a new driver.

    The caller has all tokens of the steps before. `verified`: the step was verified, and its tokens
    did not reach the caller. `if_refused`: the stream breaks only if the step accepts no candidate,
    which changes the law.
    """

    step: int
    verified: bool = False
    if_refused: bool = False

    def __str__(self) -> str:
        verified = "-verified" if self.verified else ""
        return f"resumed{self.step}{verified}{'-if-refused' if self.if_refused else ''}"


Fault = TargetFault | DrafterFault | Preemption | Pause | BrokenStream
