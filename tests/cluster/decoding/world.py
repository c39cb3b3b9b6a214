"""A target and drafters that drive the real scheduler without I/O, for tests.

The target keeps token ids in its KV blocks and answers from what it reads there, so that a wrong
rollback, a shared block or a lost prefix shows as wrong text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.decoding.events import (
    Admitted,
    Event,
    Proposal,
    Proposed,
    Request,
    SequenceVerdict,
    StepDone,
    TargetJoined,
)
from cluster.decoding.instructions import (
    CloseDraft,
    Emit,
    Finish,
    FinishReason,
    Grant,
    OpenDraft,
    RunStep,
    SendOutcome,
    Slice,
    WakeAt,
)
from cluster.decoding.policies import PolicyName
from cluster.decoding.scheduler import Scheduler
from paceline.prefix_hash import extend_hash, hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec

VOCAB_SIZE = 50
END_TOKEN = 0
BLOCK_SIZE = 4


def true_token(prefix: list[int], seed: int) -> int:
    """What the pretended target chooses after a prefix. Rarely the end token.

    It looks at the last eight tokens and the length, which tells any wrong prefix soon enough.
    """
    value = extend_hash(extend_hash(hash_prefix(prefix[-8:]), len(prefix)), seed)
    return END_TOKEN if value % 97 == 0 else 1 + value % (VOCAB_SIZE - 1)


@functools.cache
def plain_text(prompt: tuple[int, ...], seed: int, max_tokens: int) -> list[int]:
    """Plain decoding."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(true_token(tokens, seed))
        if tokens[-1] == END_TOKEN:
            break
    return tokens[len(prompt) :]


def request(
    sequence_id: int,
    prompt: tuple[int, ...],
    *,
    max_tokens: int = 20,
    policy: PolicyName = PolicyName.CHAIN,
    window: int = 4,
) -> Request:
    """A request whose seed is its id."""
    spec = SequenceSpec(
        SamplingParams(), seed=sequence_id, prompt_length=len(prompt), end_token_ids=(END_TOKEN,)
    )
    return Request(sequence_id, prompt, spec, max_tokens, policy, window)


@dataclass
class PretendedTarget:
    """Holds token ids where a real one holds keys and values."""

    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)
    max_slices: int = 0

    def run(self, step: RunStep) -> tuple[SequenceVerdict, ...]:
        """Apply a step and answer it."""
        for sequence_id in step.close:
            del self.tables[sequence_id]
        for sequence_id, spec in step.open:
            assert sequence_id not in self.tables
            self.tables[sequence_id] = []
            self.seeds[sequence_id] = spec.seed
        ids = [part.sequence_id for part in step.slices]
        assert len(ids) == len(set(ids))
        self.max_slices = max(self.max_slices, len(ids))
        verdicts = [self._run_slice(part) for part in step.slices]
        return tuple(verdict for verdict in verdicts if verdict is not None)

    def _run_slice(self, part: Slice) -> SequenceVerdict | None:
        table = self.tables[part.sequence_id]
        table.extend(part.new_blocks)
        for offset, token_id in enumerate(part.token_ids):
            position = part.start + offset
            self.kv[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = token_id
        if not part.verdict:
            return None
        end = part.start + len(part.token_ids)
        read = [self.kv[table[i // BLOCK_SIZE], i % BLOCK_SIZE] for i in range(end)]
        seed = self.seeds[part.sequence_id]
        committed = end - part.window
        for accepted in range(part.window + 1):
            chosen = true_token(read[: committed + accepted], seed)
            if accepted == part.window or read[committed + accepted] != chosen:
                break
        return SequenceVerdict(part.sequence_id, accepted, chosen)


@dataclass
class PretendedDrafter:
    """Keeps sequences as a real drafter does; `guess` makes its tokens."""

    guess: Callable[[list[int], int], int]
    paths: dict[int, list[int]] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)
    granted: dict[int, int] = field(default_factory=dict)

    def tell(self, message: OpenDraft | SendOutcome | Grant | CloseDraft) -> None:
        """A message of the driver."""
        match message:
            case OpenDraft(_, sequence_id, spec, token_ids):
                self.paths[sequence_id] = list(token_ids)
                self.seeds[sequence_id] = spec.seed
                self.granted[sequence_id] = 0
            case SendOutcome(_, sequence_id, position, token_ids):
                path = self.paths[sequence_id]
                for offset, token_id in enumerate(token_ids):
                    at = position + offset
                    if at < len(path) and path[at] != token_id:
                        del path[at:]
                    if at == len(path):
                        path.append(token_id)
            case Grant(_, sequence_id, until_position, _):
                self.granted[sequence_id] = until_position
            case CloseDraft(_, sequence_id):
                del self.paths[sequence_id]

    def run_pass(self) -> tuple[Proposal, ...]:
        """One token for each sequence that may have one."""
        proposals = []
        for sequence_id, path in self.paths.items():
            if len(path) < self.granted[sequence_id] and path[-1] != END_TOKEN:
                base = (len(path), hash_prefix(path))
                path.append(self.guess(path, self.seeds[sequence_id]))
                last = path[-1] == END_TOKEN
                proposals.append(Proposal(sequence_id, *base, (path[-1],), last))
        return tuple(proposals)


class World:
    """The scheduler, one target and any drafters; every event is followed by the invariants."""

    def __init__(self, scheduler: Scheduler, *, num_blocks: int = 64) -> None:
        self.scheduler = scheduler
        self.num_blocks = num_blocks
        self.now = 0.0
        self.target = PretendedTarget()
        self.drafters: dict[str, PretendedDrafter] = {}
        self.step: RunStep | None = None
        self.wake_at: float | None = None
        self.requests: dict[int, Request] = {}
        self.emitted: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}

    def send(self, event: Event) -> None:
        """Hand in an event and carry out what comes back."""
        if isinstance(event, Admitted):
            self.requests[event.request.sequence_id] = event.request
            self.emitted[event.request.sequence_id] = []
        for instruction in self.scheduler.handle(event):
            match instruction:
                case RunStep():
                    assert self.step is None, "two steps in flight"
                    self.step = instruction
                case Emit(sequence_id, offset, token_ids, num_drafted):
                    assert sequence_id not in self.finished
                    assert offset == len(self.emitted[sequence_id])
                    assert 0 <= num_drafted <= len(token_ids)
                    self.emitted[sequence_id].extend(token_ids)
                case Finish(sequence_id):
                    assert sequence_id not in self.finished
                    self.finished[sequence_id] = instruction
                case WakeAt(time):
                    self.wake_at = time
                case _:
                    self.drafters[instruction.drafter].tell(instruction)
        self.scheduler.check_integrity()
        self.check_text()
        if self.step is None and self.target_joined:
            batching = self.scheduler._batching
            policies = {self.requests[i].policy for i in batching.running}
            # A policy that waits by its nature may hold the last blocks for its bounded time.
            assert not policies or PolicyName.LOCKSTEP in policies, "the target idles"
            assert batching.running or not batching.waiting, "nobody is let in"

    @property
    def target_joined(self) -> bool:
        """Whether the scheduler has a target."""
        return self.scheduler._batching.target is not None

    def join_target(self) -> None:
        """A fresh target joins."""
        self.target, self.step = PretendedTarget(), None
        self.send(TargetJoined(self.now, VOCAB_SIZE, 1000, BLOCK_SIZE, self.num_blocks))

    def answer(self) -> None:
        """The step in flight is done."""
        step, self.step = self.step, None
        assert step is not None
        self.send(StepDone(self.now, step.step, self.target.run(step)))

    def draft(self, name: str) -> None:
        """One pass of a drafter, delivered at once."""
        self.send(Proposed(self.now, name, self.drafters[name].run_pass()))

    def check_text(self) -> None:
        """What was emitted is the begin of plain decoding, the whole of it when finished."""
        for sequence_id, emitted in self.emitted.items():
            asked = self.requests[sequence_id]
            plain = plain_text(asked.prompt_token_ids, asked.spec.seed, asked.max_tokens)
            assert emitted == plain[: len(emitted)]
            end = self.finished.get(sequence_id)
            if end is not None and end.reason is not FinishReason.CANCELLED:
                assert emitted == plain
