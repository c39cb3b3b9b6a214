"""The events of the scheduler. `now` is the driver's monotonic clock in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.decoding.predicted import Prediction
from paceline.generation import TokenLogprobs
from paceline.options import Stopping
from paceline.sampling import SequenceSpec
from workers.drafting.kind import TopTokens as TopTokens
from workers.drafting.proposal import Proposal as Proposal
from workers.verification.structure import Matcher


class StopScanner(Protocol):
    """Finds stop strings in a sequence's output. Handed in, because it needs a detokenizer."""

    def first_stop(self, token_ids: Sequence[int]) -> int | None:
        """Append committed tokens. Returns how many there are up to the end of a stop string.

        None: no stop string is complete.
        """


_SHORTEST, _LONGEST = 1e-6, 3600.0
"""Seconds that a step, a pass or a message between them may take."""


def is_believable(seconds: float) -> bool:
    """Whether to learn from a duration. Clocks may jump, and a drafter may report anything."""
    return _SHORTEST < seconds < _LONGEST


@dataclass(frozen=True, slots=True)
class Request:
    """A sequence to decode. `spec.prompt_length` equals the length of `prompt_token_ids`.

    `output_token_ids`: output that was committed before, fewer than `max_tokens`. `prefix_hash`:
    paceline.prefix_hash of prompt and that output; None: the scheduler computes it. `window`: the
    most candidates that a step verifies. `priority`: of waiting sequences, a higher one is let in
    first. `matcher`: of the structure that `spec` has, after that output; None: there is none, or
    nothing is known ahead. It belongs to the scheduler. `trees`: whether `auto` may choose trees.
    `prediction`: what the caller expects, after that output; it belongs to the scheduler too.
    `tells_refused`: each Emit has the candidates that were refused.
    """

    sequence_id: int
    prompt_token_ids: tuple[int, ...]
    spec: SequenceSpec
    max_tokens: int
    policy: str
    window: int
    stop_scanner: StopScanner | None = None
    stopping: Stopping = Stopping.FIXED
    branches: int = 1
    drafter_kind: str | None = None
    merge: bool = False
    tenant: str = ""
    priority: int = 0
    prefix_hash: int | None = None
    output_token_ids: tuple[int, ...] = ()
    matcher: Matcher | None = None
    trees: bool = True
    prediction: Prediction | None = None
    tells_refused: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request came in. It must fit the target (`Scheduler.check_fits`)."""

    now: float
    request: Request


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller of a sequence went away."""

    now: float
    sequence_id: int


@dataclass(frozen=True, slots=True)
class Paused:
    """The caller does not read: decode nothing more for it until `Resumed`.

    The sequence gives up its place in the batch, its KV blocks and its drafters, so that it holds
    nothing that others could use. If a step of it is in flight, it does so once that is answered.
    Pausing twice is no error.
    """

    now: float
    sequence_id: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The caller reads again. The sequence waits in its place in the order of arrival."""

    now: float
    sequence_id: int


@dataclass(frozen=True, slots=True)
class MalformedProposal:
    """A drafter sent a proposal that breaks the contract. The proposal was dropped."""

    now: float
    drafter: str


@dataclass(frozen=True, slots=True)
class Proposed:
    """One message of a drafter, sent after a pass of `pass_seconds`.

    Without proposals it reports a prefill. `entries`: those of the message (drafting.proto),
    including what was dropped when it was read; None: not counted. `passes`: how many forward
    passes were made one after another meanwhile.
    """

    now: float
    drafter: str
    proposals: tuple[Proposal, ...]
    pass_seconds: float = 0.0
    entries: int | None = None
    passes: int = 1

    @property
    def seconds_a_pass(self) -> float:
        """The believable seconds of each of the passes."""
        return self.believable_seconds / self.passes

    @property
    def believable_seconds(self) -> float:
        """`pass_seconds`, or 0 if no pass can take that long: drafters are not trusted."""
        return self.pass_seconds if is_believable(self.pass_seconds) else 0.0


@dataclass(frozen=True, slots=True)
class DraftDeclined:
    """A drafter will not draft for this sequence. `for_good`: do not ask it again."""

    now: float
    drafter: str
    sequence_id: int
    for_good: bool = False


@dataclass(slots=True)
class SequenceVerdict:
    """The target's answer for one sequence: accepted candidates and the token after them.

    `accepted`: indices of the accepted path; empty: the first `num_accepted`. `logprobs`: of the
    accepted candidates and the token, if the request asks for them. `error`: why there is no
    answer; the other fields then mean nothing.
    """

    sequence_id: int
    num_accepted: int
    token_id: int
    accepted: tuple[int, ...] = ()
    top_tokens: tuple[TopTokens, ...] = ()
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class FedTopTokens:
    """The target's likeliest tokens after each token of a slice without a verdict."""

    sequence_id: int
    top_tokens: tuple[TopTokens, ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    """Rank 0 of a target group answered a step.

    `step_seconds`: time of the device. `driver_seconds`: time that the driver worked since the
    previous answer, on all that it read and sent; 0: not known. `prompt_logprobs`: by sequence id,
    those of the tokens that a slice names.
    """

    now: float
    step: int
    verdicts: tuple[SequenceVerdict, ...]
    step_seconds: float = 0.0
    driver_seconds: float = 0.0
    group: int = 0
    fed: tuple[FedTopTokens, ...] = ()
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrafterJoined:
    """A drafter can be used. It drafts no token at or beyond `max_position`.

    `has_model`: it drafts with a model. It is preferred to a drafter without one. `distance`: 0 for
    the nearest. `shares_host`: it computes on a host of the target, so that steps may take longer
    while it drafts.
    """

    now: float
    drafter: str
    max_position: int
    kind: str = "model"
    has_model: bool = True
    rules: frozenset[str] = frozenset({"coupled"})
    wants_top_tokens: bool = False
    distance: int = 0
    shares_host: bool = False


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """A drafter's stream broke. It may join again under the same name."""

    now: float
    drafter: str


@dataclass(frozen=True, slots=True)
class TargetJoined:
    """A target group can step: every shard has a fresh stream. Its KV blocks are empty.

    `dtype`, `checkpoint_digest`, `model`: as its shards report them (target.proto).
    """

    now: float
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    group: int = 0
    dtype: str = ""
    checkpoint_digest: bytes = b""
    model: str = ""


@dataclass(frozen=True, slots=True)
class TargetLost:
    """A stream to a shard of a group broke. Its step in flight will not be answered."""

    now: float
    group: int = 0


@dataclass(frozen=True, slots=True)
class TargetScaled:
    """The target is to have `num_groups` groups, numbered from 0.

    Further ones join later. Those with higher numbers let nobody in. Their sequences finish there,
    or go on in other groups as soon as these have room. Such a group is forgotten once it is lost.
    Until then no group is added, and the event must be sent again after that.
    """

    now: float
    num_groups: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that a WakeAt asked for has come."""

    now: float


DraftEvent = Proposed | MalformedProposal | DraftDeclined | DrafterJoined | DrafterLost

Event = (
    Admitted
    | Cancelled
    | Paused
    | Resumed
    | DraftEvent
    | StepDone
    | TargetJoined
    | TargetLost
    | TargetScaled
    | Tick
)
