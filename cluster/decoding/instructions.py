"""Instructions of the scheduler to the driver, to be carried out in the order given."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.decoding.events import TopTokens
from paceline.errors import PacelineError
from paceline.generation import RequestStats, TokenLogprobs
from paceline.options import Stopping
from paceline.sampling import SequenceSpec
from workers.drafting.tree import Grant
from workers.verification.candidates import SparseProbs


@dataclass(slots=True)
class Slice:
    """One sequence's part of a step (target.proto, Slice)."""

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    window: int
    verdict: bool
    new_blocks: tuple[int, ...]
    parents: tuple[int, ...] = ()
    kv_moves: tuple[tuple[int, int], ...] = ()
    multiplicities: tuple[int, ...] = ()
    distributions: Mapping[int, SparseProbs] = field(default_factory=dict)
    top_tokens: bool = False
    logprobs_of: tuple[int, ...] = ()

    @property
    def decodes(self) -> bool:
        """Whether this is decoding, be it to catch up with committed tokens; else it is prefill."""
        return self.verdict and (self.window > 0 or len(self.token_ids) == 1)


@dataclass(frozen=True, slots=True)
class OpenAtTarget:
    """Open a sequence at the target. `shared_blocks` hold the KV of its first tokens."""

    sequence_id: int
    spec: SequenceSpec
    shared_blocks: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunStep:
    """Send a step to every shard of a target group. Each group numbers its own steps.

    Closes are applied first, then opens, then the slices.
    """

    step: int
    open: tuple[OpenAtTarget, ...]
    close: tuple[int, ...]
    slices: tuple[Slice, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """Open a sequence at a drafter, with all its committed tokens.

    `vocab_size`: size of the target's vocabulary.
    """

    drafter: str
    sequence_id: int
    spec: SequenceSpec
    token_ids: tuple[int, ...]
    stopping: Stopping = Stopping.FIXED
    tenant: str = ""
    vocab_size: int = 0


@dataclass(slots=True)
class SendOutcome:
    """Tell a drafter the tokens committed from `position` on.

    There are none if the message only carries likely followers of prompt tokens.
    """

    drafter: str
    sequence_id: int
    position: int
    token_ids: tuple[int, ...]
    top_tokens: tuple[TopTokens, ...] = ()


@dataclass(slots=True)
class SendGrant:
    """Let a drafter draft for a sequence."""

    drafter: str
    sequence_id: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Suspect:
    """A drafter broke the contract, as `reason` says, and is no longer used."""

    drafter: str
    reason: str


@dataclass(frozen=True, slots=True)
class CloseDraft:
    """Have a drafter free what it keeps for a sequence."""

    drafter: str
    sequence_id: int


@dataclass(slots=True)
class Emit:
    """Committed tokens for the caller. The first `num_drafted` were candidates.

    `logprobs`, if asked for, has an entry per token. `prompt_logprobs`: of the next prompt tokens,
    if these were asked for; then there are no tokens. `refused`, if asked for: the candidates that
    the last token is in place of, from its position on.
    """

    sequence_id: int
    offset: int
    token_ids: tuple[int, ...]
    num_drafted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    refused: tuple[int, ...] = ()


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Finish:
    """A sequence ended. No instruction follows for it. `output_tokens`: those committed for it."""

    sequence_id: int
    reason: FinishReason
    stats: RequestStats
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """A sequence cannot be decoded. No instruction follows for it.

    The target can never hold it, or fails because of it.
    """

    sequence_id: int
    error: PacelineError


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick at this time, unless another WakeAt replaces this one."""

    time: float


DraftInstruction = OpenDraft | SendOutcome | SendGrant | CloseDraft
"""What a drafter is told."""

Instruction = RunStep | DraftInstruction | Suspect | Emit | Finish | Refuse | WakeAt
