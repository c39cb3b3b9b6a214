"""What a caller sends and what the server answers, as plain frozen values.

The options of a request are in paceline/options.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from paceline.chat import Chat, Message
from paceline.errors import InternalError
from paceline.sampling import SamplingParams

FinishReason = Literal["stop", "length", "cancelled"]
Origin = Literal["draft", "target"]


GenerateInput = str | Sequence[int] | Sequence[Message] | Chat
"""Text to continue, token ids to continue, or a chat to answer."""

CallerInput = GenerateInput | Sequence[Message | Mapping[str, object]]
"""The same, or a chat as OpenAI's clients write it: tables with a `role` and a `content`, which is
a text or a list of parts such as `{"type": "text", "text": "..."}`."""


def chat_of(given: GenerateInput) -> Chat | None:
    """The chat of an input; None for a text or token ids."""
    if isinstance(given, Chat):
        return given
    if not isinstance(given, str) and given and all(isinstance(one, Message) for one in given):
        return Chat(cast("Sequence[Message]", given))
    return None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the target found a token, and which tokens it found likeliest in its place.

    By the softmax of the target's raw logits: before bias, penalties, temperature and filters.
    `logprob` is None for the first token of a prompt, of which only `token` is known. `rank`: 1 +
    the number of likelier tokens. `top_ids`: the likeliest tokens, the likeliest first, as many as
    were asked for. `token` and `top_tokens` are the bytes of the tokens' texts, which may be parts
    of characters.
    """

    logprob: float | None
    rank: int = 0
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    token: bytes = b""
    top_tokens: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of every stream. `seed` is the seed in use.

    `in_reasoning`: the prompt of a chat ends inside `<think>`, so the answer begins with reasoning.
    """

    request_id: str
    seed: int
    prompt_token_ids: tuple[int, ...]
    in_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Committed tokens. `offset` is the number of output tokens before them.

    `text` is the text that became certain with these tokens. `pieces` divides it by token. The last
    chunk of a stream may have no tokens and no pieces, only the rest of the text. `padded`: whether
    a server hides its size on the wire.

    `logprobs`, if asked for, has one entry per token. `prompt_logprobs`, if asked for, come in
    chunks before the first output token: one entry per prompt token in all. `sample`: the number of
    the sample, from 0; those of the prompt come once for all samples, as 0. `refused`, if asked
    for: the texts of candidates that the last token is in place of, from its position on.
    """

    offset: int
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    text: str
    pieces: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    padded: bool = False
    sample: int = 0
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counts of drafting. For each field see inference.proto, SpeculationStats."""

    drafted_at: tuple[int, ...] = ()
    tried_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    proposed: int = 0
    used: int = 0
    wasted_steps: int = 0
    diverged: int = 0
    branch_hits: int = 0
    target_idle: float | None = None
    drafter_idle: float | None = None
    efficiency: float | None = None
    choices: Mapping[str, int] = field(default_factory=dict)
    estimates: Mapping[str, float] = field(default_factory=dict)

    @property
    def acceptance(self) -> float | None:
        """Chance that a candidate is accepted if those before it were; None if none was tried."""
        return _ratio(sum(self.accepted_at), sum(self.tried_at))

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """`acceptance` by position in the window."""
        accepted_at = (*self.accepted_at, *(0,) * len(self.tried_at))
        return tuple(
            accepted / tried for accepted, tried in zip(accepted_at, self.tried_at, strict=False)
        )

    @property
    def used_share(self) -> float | None:
        """Share of proposed tokens that were used; None if there were none."""
        return _ratio(self.used, self.proposed)

    @property
    def hit_rate(self) -> float | None:
        """Of the verdicts against the first candidate, the share whose token was in a branch."""
        return _ratio(self.branch_hits, self.diverged)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Counts of one request. Durations are in seconds from its admission.

    `stopping_state` is the last state of its stopping rule, by name; empty for "fixed".
    `accepted_prediction_tokens`, `rejected_prediction_tokens`: tokens of its prediction that the
    output has, and the others. `cached_prompt_tokens`: those of its prompt that the cache had.
    """

    steps: int
    drafted: int
    accepted: int
    acceptance_length: float
    seconds: float
    ttft_seconds: float
    stopping_state: Mapping[str, float] = field(default_factory=dict)
    speculation: SpeculationStats = SpeculationStats()
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a sample that ends without an error, and so of a stream with one sample.

    `stop`: the stop string that ended it; "" for none.
    """

    reason: FinishReason
    stats: RequestStats
    sample: int = 0
    stop: str = ""


GenerateEvent = Started | Chunk | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `token_ids` includes the token that ended it; `text` does not.

    `logprobs` and `prompt_logprobs` have an entry per output token and per prompt token if they
    were asked for, else none.
    """

    request_id: str
    seed: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    text: str
    finish_reason: FinishReason
    stats: RequestStats
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class SampleBuilder:
    """Builds the completion of one sample from its events. It does not keep the events."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._token_ids: list[int] = []
        self._origins: list[Origin] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    def add(self, event: GenerateEvent) -> None:
        """Add the next event of the sample."""
        match event:
            case Started():
                self._started = event
            case Chunk():
                self._token_ids += event.token_ids
                self._origins += event.origins
                self._texts.append(event.text)
                self._logprobs += event.logprobs
                self._prompt_logprobs += event.prompt_logprobs
            case Finished():
                self._finished = event

    def build(self) -> Completion:
        """The completion. Raises InternalError if `Started` or `Finished` is missing."""
        if self._started is None or self._finished is None:
            raise InternalError(
                "expected the stream to begin with Started and to end with Finished, but it ended "
                f"after {len(self._token_ids)} tokens; please report this"
            )
        return Completion(
            request_id=self._started.request_id,
            seed=self._started.seed,
            prompt_token_ids=self._started.prompt_token_ids,
            token_ids=tuple(self._token_ids),
            origins=tuple(self._origins),
            text="".join(self._texts),
            finish_reason=self._finished.reason,
            stats=self._finished.stats,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )


class CompletionBuilder:
    """Builds the completions of all samples from the events of one stream."""

    def __init__(self, num_samples: int = 1) -> None:
        self._samples = [SampleBuilder() for _ in range(num_samples)]

    def add(self, event: GenerateEvent) -> None:
        """Add the next event of the stream. What is of the prompt is each sample's."""
        for sample in samples_of(event, len(self._samples)):
            self._samples[sample].add(event)

    def extend(self, events: Iterable[GenerateEvent]) -> CompletionBuilder:
        """Add events in order."""
        for event in events:
            self.add(event)
        return self

    def build(self) -> Completion:
        """The completion of the first sample. Raises InternalError if it is not whole."""
        return self._samples[0].build()

    def build_all(self) -> tuple[Completion, ...]:
        """The completions by sample. Raises InternalError if one is not whole."""
        return tuple(one.build() for one in self._samples)


def samples_of(event: GenerateEvent, num_samples: int) -> Sequence[int]:
    """The samples that an event is about: its own, or all of them if it tells of the prompt."""
    if isinstance(event, Started) or (isinstance(event, Chunk) and event.prompt_logprobs):
        return range(num_samples)
    return (event.sample,)


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Counts of one worker since the driver started; see inference.proto, WorkerStats.

    `kind` is "target", "emulated", or the drafter's kind, such as "model". `malformed` counts
    proposals that broke the contract; a `suspect` drafter sent too many of them, and is not used
    until its process is started again. `overruns` counts passes that took longer than the emulated
    device would take. `away_seconds` is the time without a connection, 0 while connected. `trouble`
    is why the last attempt to connect failed, "" if it did not. `shares`: how many parties had
    sequences at a drafter lately, this driver's own included; 0: not known.
    """

    name: str
    kind: str
    address: str
    pid: int
    connected: bool
    busy_seconds: float
    passes: int
    tokens: int
    reconnects: int
    malformed: int = 0
    suspect: bool = False
    overruns: int = 0
    away_seconds: float = 0.0
    trouble: str = ""
    shares: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """Restarts of a worker, or of the driver; see inference.proto, WorkerLife.

    `last_end` is why its last process ended, "" if none did. `next_try_seconds` is the time until
    the next start, None while it serves or starts. `log` is a path on its host, "" for none.
    """

    name: str
    restarts: int
    last_end: str = ""
    next_try_seconds: float | None = None
    log: str = ""


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the server started; see inference.proto, StatsResponse."""

    uptime_seconds: float
    steps: int
    committed_tokens: int
    drafted: int
    accepted: int
    requests_finished: int
    sequences_running: int
    sequences_waiting: int
    gap_ms_p50: float
    workers: tuple[WorkerStats, ...]
    prefilled_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    driver_ms_p50: float = 0.0
    verdicts: int = 0
    speculation: SpeculationStats = SpeculationStats()
    lives: tuple[WorkerLife, ...] = ()
    kv_blocks: int = 0
    kv_blocks_held: int = 0

    @property
    def acceptance_length(self) -> float | None:
        """Committed tokens per verdict; None before the first verdict."""
        return _ratio(self.committed_tokens, self.verdicts)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is served; see inference.proto, DescribeModelResponse."""

    model: str
    vocab_size: int
    max_model_len: int
    end_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    policies: tuple[str, ...]
    default_policy: str
    default_window: int
    tool_format: str = ""
    reasoning_format: str = ""


@dataclass(frozen=True, slots=True)
class TopologyWorker:
    """A worker of a deployment; see inference.proto, TopologyWorker."""

    name: str
    kind: str
    model: str
    address: str
    connected: bool


@dataclass(frozen=True, slots=True)
class DefaultSpeculation:
    """How a request speculates that has no such options. `drafter`: a kind; "" for any."""

    policy: str
    rule: str
    window: int
    branches: int
    stopping: str
    drafter: str
    merge: bool


@dataclass(frozen=True, slots=True)
class Topology:
    """The layout of a deployment; see inference.proto, DescribeTopologyResponse.

    `target_groups`: the shards of each group, by rank.
    """

    version: str
    target_groups: tuple[tuple[TopologyWorker, ...], ...]
    drafters: tuple[TopologyWorker, ...]
    rules: tuple[str, ...]
    policies: tuple[str, ...]
    default_speculation: DefaultSpeculation


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a text or chat; see inference.proto, TokenizeResponse."""

    token_ids: tuple[int, ...]
    token_strings: tuple[str, ...]
    max_model_len: int
