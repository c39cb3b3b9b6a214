"""A target and drafters that drive the real scheduler without I/O, for tests.

The target keeps token ids in its KV blocks, each with a hash of all that its token was computed
after, and answers from what it reads there: a wrong rollback, a block shared by mistake or a lost
prefix shows as wrong text.
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
    TargetLost,
)
from cluster.decoding.instructions import (
    CloseDraft,
    Emit,
    Finish,
    FinishReason,
    Grant,
    OpenDraft,
    Refuse,
    RunStep,
    SendOutcome,
    Slice,
    Suspect,
    WakeAt,
)
from cluster.decoding.policies import PolicyName, policy_named
from cluster.decoding.scheduler import Scheduler
from paceline.prefix_hash import extend_hash, hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec

VOCAB_SIZE = 50
END_TOKEN = 0
BLOCK_SIZE = 4


def true_token(prefix: list[int], seed: int) -> int:
    """What the pretended target chooses after a prefix, all of which it looks at.

    Rarely the end token.
    """
    value = extend_hash(hash(tuple(prefix)), seed)  # a hash of integers is the same in every run
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
    branches: int = 1,
    tenant: str = "",
    merge: bool = False,
) -> Request:
    """A request whose seed is its id."""
    spec = SequenceSpec(
        SamplingParams(), seed=sequence_id, prompt_length=len(prompt), end_token_ids=(END_TOKEN,)
    )
    return Request(
        sequence_id,
        prompt,
        spec,
        max_tokens,
        policy,
        window,
        branches=branches,
        tenant=tenant,
        merge=merge,
    )


@dataclass
class PretendedTarget:
    """Holds (token id, hash of the tokens up to it) where a real one holds keys and values."""

    kv: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)
    max_slices: int = 0
    num_trees: int = 0
    num_shared: int = 0

    def run(self, step: RunStep) -> tuple[SequenceVerdict, ...]:
        """Apply a step and answer it."""
        for sequence_id in step.close:
            del self.tables[sequence_id]
        for opened in step.open:
            assert opened.sequence_id not in self.tables
            self.tables[opened.sequence_id] = list(opened.shared_blocks)
            self.seeds[opened.sequence_id] = opened.spec.seed
            self.num_shared += len(opened.shared_blocks)
        ids = [part.sequence_id for part in step.slices]
        assert len(ids) == len(set(ids))
        self.max_slices = max(self.max_slices, len(ids))
        verdicts = [self._run_slice(part) for part in step.slices]
        return tuple(verdict for verdict in verdicts if verdict is not None)

    def _run_slice(self, part: Slice) -> SequenceVerdict | None:
        table = self.tables[part.sequence_id]

        def slot(position: int) -> tuple[int, int]:
            return table[position // BLOCK_SIZE], position % BLOCK_SIZE

        for source, to in part.kv_moves:
            self.kv[slot(to)] = self.kv[slot(source)]
        table.extend(part.new_blocks)
        end = part.start + len(part.token_ids)
        committed = end - part.window
        parents = part.parents or tuple(range(part.window))
        for position, token_id in zip(range(part.start, end), part.token_ids, strict=True):
            before = position - 1
            if position >= committed:
                before = committed - 1 + parents[position - committed]
            seen = self.kv[slot(before)][1] if before >= 0 else 0
            self.kv[slot(position)] = token_id, hash((seen, token_id))
        if not part.verdict:
            return None
        read = [self.kv[slot(position)] for position in range(end)]
        path, seen = [], 0
        for token_id, computed_after in read[:committed]:
            path.append(token_id)
            seen = hash((seen, token_id))
            assert computed_after == seen, "KV that was computed after other tokens"
        candidates = [token_id for token_id, _ in read[committed:]]
        self.num_trees += bool(part.parents)
        accepted, node = [], 0
        while True:
            chosen = true_token(path, self.seeds[part.sequence_id])
            fitting = (i for i, t in enumerate(candidates) if parents[i] == node and t == chosen)
            index = next(fitting, None)
            if index is None:
                break
            accepted.append(index)
            path.append(chosen)
            node = index + 1
        is_first = accepted == list(range(len(accepted)))
        told = () if is_first and not part.parents else tuple(accepted)
        return SequenceVerdict(part.sequence_id, len(accepted), chosen, told)


@dataclass
class DraftedSequence:
    """What a drafter keeps: committed tokens, and every candidate as the tokens that lead to it."""

    committed: list[int]
    seed: int
    candidates: list[tuple[int, ...]] = field(default_factory=list)
    until_position: int = 0
    nodes: int = 0
    branches: int = 1


@dataclass
class PretendedDrafter:
    """Keeps sequences as a real drafter does; `guess` makes tokens, `pick` chooses what grows."""

    guess: Callable[[list[int], int], int]
    pick: Callable[[int], int] = lambda count: count - 1
    sequences: dict[int, DraftedSequence] = field(default_factory=dict)

    def tell(self, message: OpenDraft | SendOutcome | Grant | CloseDraft) -> None:
        """A message of the driver."""
        match message:
            case OpenDraft(_, sequence_id, spec, token_ids):
                self.sequences[sequence_id] = DraftedSequence(list(token_ids), spec.seed)
            case SendOutcome(_, sequence_id, position, token_ids):
                drafted = self.sequences[sequence_id]
                assert position == len(drafted.committed)
                drafted.committed.extend(token_ids)
                count = len(token_ids)
                drafted.candidates = [
                    c[count:]
                    for c in drafted.candidates
                    if len(c) > count and c[:count] == token_ids
                ]
            case Grant(_, sequence_id):
                drafted = self.sequences[sequence_id]
                drafted.until_position, drafted.nodes = message.until_position, message.nodes
                # Where branches are wanted, some nodes get a second child.
                drafted.branches = max(message.branches, 2 if message.fan_out else 1)
            case CloseDraft(_, sequence_id):
                del self.sequences[sequence_id]

    def run_pass(self) -> tuple[Proposal, ...]:
        """One node more, or the children of one, for each sequence that may have them."""
        return tuple(
            proposal
            for sequence_id, drafted in self.sequences.items()
            if (proposal := self._grow(sequence_id, drafted)) is not None
        )

    def _grow(self, sequence_id: int, drafted: DraftedSequence) -> Proposal | None:
        inner = {c[:-1] for c in drafted.candidates}
        leaves = [c for c in ((), *drafted.candidates) if c not in inner and c[-1:] != (END_TOKEN,)]
        room = drafted.nodes - len(drafted.candidates)
        if room <= 0 or not leaves:
            return None
        leaf = leaves[self.pick(len(leaves)) if drafted.branches > 1 else -1]
        path = [*drafted.committed, *leaf]
        if len(path) >= drafted.until_position:
            return None
        count = min(drafted.branches, room)
        made = dict.fromkeys(self.guess(path, drafted.seed) for _ in range(count))
        drafted.candidates.extend((*leaf, token_id) for token_id in made)
        return Proposal(
            sequence_id,
            len(path),
            hash_prefix(path),
            tuple(made),
            last=set(made) == {END_TOKEN},
            parents=(0,) * len(made),
        )


class World:
    """The scheduler, its target groups and any drafters; every event is followed by the invariants.

    A step takes 10 ms and 1 ms a token, unless `step_seconds` says what so many tokens take.
    """

    def __init__(self, scheduler: Scheduler, *, num_blocks: int = 64, num_groups: int = 1) -> None:
        self.scheduler = scheduler
        self.num_blocks = num_blocks
        self.max_model_len = 1000
        self.now = 0.0
        self.step_seconds: Callable[[int], float] = lambda tokens: 0.010 + 0.001 * tokens
        self.targets = [PretendedTarget() for _ in range(num_groups)]
        self.drafters: dict[str, PretendedDrafter] = {}
        self.steps: dict[int, RunStep] = {}
        """In flight, by group."""
        self.wake_at: float | None = None
        self.suspects: list[str] = []
        self.requests: dict[int, Request] = {}
        self.emitted: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.refused: dict[int, Refuse] = {}

    def send(self, event: Event) -> None:
        """Hand in an event and carry out what comes back."""
        if isinstance(event, Admitted):
            self.requests[event.request.sequence_id] = event.request
            self.emitted[event.request.sequence_id] = []
        for instruction in self.scheduler.handle(event):
            match instruction:
                case RunStep():
                    assert instruction.group not in self.steps, "two steps in flight"
                    self.steps[instruction.group] = instruction
                case Emit(sequence_id, offset, token_ids, num_drafted):
                    assert sequence_id not in self.finished
                    assert offset == len(self.emitted[sequence_id])
                    assert 0 <= num_drafted <= len(token_ids)
                    self.emitted[sequence_id].extend(token_ids)
                    self.check_text(sequence_id)
                case Finish(sequence_id):
                    assert sequence_id not in self.finished
                    self.finished[sequence_id] = instruction
                    self.check_text(sequence_id)
                case Refuse(sequence_id):
                    assert sequence_id not in self.finished
                    self.refused[sequence_id] = instruction
                case WakeAt(time):
                    self.wake_at = time
                case Suspect(drafter):
                    self.suspects.append(drafter)
                case _:
                    self.drafters[instruction.drafter].tell(instruction)
        self.scheduler.check_integrity()
        for group in self.scheduler._state.groups:
            if group.number in self.steps or not group.joined:
                continue
            # A sequence that another group verifies may wait for more to verify.
            idle = group.batching.running.keys() - self._shared_steps()
            policies = {policy_named(self.requests[i].policy) for i in idle}
            # A policy that waits by its nature may hold the last blocks for its bounded time.
            assert not policies or any(one.waits for one in policies), "the target idles"
            assert group.batching.running or not group.batching.waiting, "nobody is let in"

    def _shared_steps(self) -> set[int]:
        """Sequences in flight whose policy has several groups verify them."""
        parts = [part for step in self.steps.values() for part in step.slices]
        return {
            part.sequence_id
            for part in parts
            if policy_named(self.requests[part.sequence_id].policy).replicates
        }

    @property
    def target(self) -> PretendedTarget:
        """The only group's."""
        (target,) = self.targets
        return target

    @property
    def step(self) -> RunStep | None:
        """The step in flight, of the lowest group that has one."""
        return self.steps[min(self.steps)] if self.steps else None

    @property
    def target_joined(self) -> bool:
        """Whether the scheduler has a target."""
        return any(group.joined for group in self.scheduler._state.groups)

    def join_target(self, group: int = 0) -> None:
        """A fresh target group joins."""
        self.targets[group] = PretendedTarget()
        self.steps.pop(group, None)
        self.send(
            TargetJoined(
                self.now,
                VOCAB_SIZE,
                self.max_model_len,
                BLOCK_SIZE,
                self.num_blocks,
                group=group,
            )
        )

    def lose_target(self, group: int = 0) -> None:
        """A target group is gone, with its step in flight."""
        self.steps.pop(group, None)
        self.send(TargetLost(self.now, group=group))

    def answer(self, group: int | None = None) -> None:
        """The step in flight is done: that of a group, or the only one's."""
        step = self.steps.pop(min(self.steps) if group is None else group)
        seconds = self.step_seconds(sum(len(part.token_ids) for part in step.slices))
        verdicts = self.targets[step.group].run(step)
        self.send(StepDone(self.now, step.step, verdicts, seconds, group=step.group))

    def draft(self, name: str) -> None:
        """One pass of a drafter, delivered at once."""
        self.send(Proposed(self.now, name, self.drafters[name].run_pass()))

    def check_text(self, sequence_id: int) -> None:
        """What was emitted is the begin of plain decoding, the whole of it when finished."""
        emitted, asked = self.emitted[sequence_id], self.requests[sequence_id]
        plain = plain_text(asked.prompt_token_ids, asked.spec.seed, asked.max_tokens)
        assert emitted == plain[: len(emitted)]
        end = self.finished.get(sequence_id)
        if end is not None and end.reason is not FinishReason.CANCELLED:
            assert emitted == plain
