"""What the scheduler tells the driver to do. Instructions are carried out in the order given."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from paceline.sampling import SequenceSpec


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a step (target.proto, Slice)."""

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    window: int
    verdict: bool
    new_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunStep:
    """Send a step to every shard. Closes are applied first, then opens, then the slices."""

    step: int
    open: tuple[tuple[int, SequenceSpec], ...]
    close: tuple[int, ...]
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """Open a sequence at a drafter, with all its committed tokens."""

    drafter: str
    sequence_id: int
    spec: SequenceSpec
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendOutcome:
    """Tell a drafter the tokens committed from `position` on."""

    drafter: str
    sequence_id: int
    position: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Let a drafter draft tokens for positions below `until_position`."""

    drafter: str
    sequence_id: int
    until_position: int
    branches: int = 1


@dataclass(frozen=True, slots=True)
class CloseDraft:
    """Free what a drafter keeps for a sequence."""

    drafter: str
    sequence_id: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Committed tokens for the caller. The first `num_drafted` were candidates."""

    sequence_id: int
    offset: int
    token_ids: tuple[int, ...]
    num_drafted: int


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """Counts of one sequence. Times are seconds from admission; None: it never had a token."""

    steps: int
    drafted: int
    accepted: int
    output_tokens: int
    seconds: float
    ttft_seconds: float | None


@dataclass(frozen=True, slots=True)
class Finish:
    """A sequence ended; nothing will be said of it again."""

    sequence_id: int
    reason: FinishReason
    stats: SequenceStats


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick at this time unless a later WakeAt replaces it."""

    time: float


Instruction = RunStep | OpenDraft | SendOutcome | Grant | CloseDraft | Emit | Finish | WakeAt
