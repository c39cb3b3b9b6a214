"""The real scheduler, driven without I/O by pretended targets and drafters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cluster.decoding.events import (
    Admitted,
    Event,
    Paused,
    Proposed,
    Request,
    Resumed,
    StepDone,
    TargetJoined,
    TargetLost,
    TargetScaled,
)
from cluster.decoding.instructions import (
    Emit,
    Finish,
    FinishReason,
    OpenDraft,
    Refuse,
    RunStep,
    SendGrant,
    Suspect,
    WakeAt,
)
from cluster.decoding.policy import policy_named
from cluster.decoding.scheduler import Scheduler
from cluster.driver.worker_messages import step_messages
from paceline.errors import RequestFaultError
from paceline.generation import TokenLogprobs
from paceline.v1 import target_pb2
from tests.cluster.decoding.pretended_drafter import PretendedDrafter
from tests.cluster.decoding.pretended_target import BLOCK_SIZE, PretendedTarget
from tests.cluster.decoding.true_text import VOCAB_SIZE, plain_text, true_logprobs
from workers.target.step_sequences import EngineLimits, TargetSession


class World:
    """The scheduler, its target groups and any drafters. Checks the invariants after every event.

    A step takes 10 ms and 1 ms for each token, unless `step_seconds` gives the time for a number of
    tokens.
    """

    def __init__(self, scheduler: Scheduler, *, num_blocks: int = 64, num_groups: int = 1) -> None:
        self.scheduler = scheduler
        self.num_blocks = num_blocks
        self.max_model_len = 1000
        self.now = 0.0
        self.step_seconds: Callable[[int], float] = lambda tokens: 0.010 + 0.001 * tokens
        self.targets = [PretendedTarget() for _ in range(num_groups)]
        self.shards: dict[int, TargetSession] = {}
        """A real shard's session for each group, which checks each step."""
        self.drafters: dict[str, PretendedDrafter] = {}
        self.steps: dict[int, RunStep] = {}
        """Steps in flight, by group."""
        self.wake_at: float | None = None
        self.suspects: list[str] = []
        self.requests: dict[int, Request] = {}
        self.emitted: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.finished: dict[int, Finish] = {}
        self.refused: dict[int, Refuse] = {}
        self.lost_steps: Counter[int] = Counter()
        """How often the target was lost during a step of the sequence, by sequence."""
        self.in_error: set[int] = set()
        """Sequences that had an error in place of a verdict."""
        self.hits: Counter[int] = Counter()
        """How often a sequence lost its computed KV, or was about to, by sequence."""
        self.paused: set[int] = set()
        """Requests whose callers do not read."""

    def send(self, event: Event) -> None:
        """Hand in an event and carry out the instructions."""
        if isinstance(event, Admitted):
            self.requests[event.request.sequence_id] = event.request
            self.emitted[event.request.sequence_id] = []
            self.prompt_logprobs[event.request.sequence_id] = []
        elif isinstance(event, StepDone):
            self.in_error.update(one.sequence_id for one in event.verdicts if one.error)
        elif isinstance(event, Paused) and event.sequence_id in self.requests:
            self.paused.add(event.sequence_id)
        elif isinstance(event, Resumed):
            self.paused.discard(event.sequence_id)
        for instruction in self.scheduler.handle(event):
            match instruction:
                case RunStep():
                    assert instruction.group not in self.steps, "two steps in flight"
                    self._check_by_a_shard(instruction)
                    self.steps[instruction.group] = instruction
                    self.check_trial(instruction)
                    stepping = {part.sequence_id for part in instruction.slices}
                    assert not stepping & self.paused, "a paused sequence is in a new step"
                case Emit(sequence_id, offset, token_ids, num_drafted):
                    assert sequence_id not in self.finished
                    self._check_logprobs(instruction)
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
                    if isinstance(instruction.error, RequestFaultError):
                        blamed = self.lost_steps[sequence_id] >= 2
                        assert blamed or sequence_id in self.in_error, "blamed for one loss"
                case WakeAt(time):
                    self.wake_at = time
                case Suspect(drafter, _):
                    self.suspects.append(drafter)
                case _:
                    if isinstance(instruction, SendGrant | OpenDraft):
                        assert instruction.sequence_id not in self.paused
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
            if not any(one.batching.retires for one in self.scheduler._state.groups):
                assert group.batching.running or not group.batching.waiting, "nobody is let in"

    def _check_logprobs(self, emit: Emit) -> None:
        """Check that all of a prompt come once, in order and first; and one with each token."""
        asked, told = self.requests[emit.sequence_id], self.prompt_logprobs[emit.sequence_id]
        prompt = asked.prompt_token_ids
        if emit.prompt_logprobs:
            assert not emit.token_ids
            told += emit.prompt_logprobs
            positions = range(1, 1 + len(told))
            assert told == [true_logprobs(one, prompt[one]) for one in positions]
            return
        is_asked = asked.spec.prompt_logprobs is not None
        assert len(told) == (len(prompt) - 1 if is_asked else 0)
        begin = len(prompt) + emit.offset
        assert emit.logprobs == tuple(
            true_logprobs(position, token_id)
            for position, token_id in enumerate(emit.token_ids, start=begin)
        )

    def check_trial(self, step: RunStep) -> None:
        """Check that a suspect is alone in its steps."""
        suspects = self.scheduler._state.waiting.suspects
        tried = [part.sequence_id for part in step.slices if part.sequence_id in suspects]
        assert not tried or len(step.slices) == 1, "a suspect has company"

    def _check_by_a_shard(self, step: RunStep) -> None:
        """Check that a real shard accepts the step from the wire. Raises ProtocolError."""
        (message,) = step_messages(step)
        request = target_pb2.StepRequest.FromString(message.SerializeToString())
        self.shards[step.group].begin_step(request)
        self.shards[step.group].check_integrity()

    def _shared_steps(self) -> set[int]:
        """Sequences in flight that several groups verify."""
        parts = [part for step in self.steps.values() for part in step.slices]
        return {
            part.sequence_id
            for part in parts
            if policy_named(self.requests[part.sequence_id].policy).replicates
        }

    @property
    def ended(self) -> set[int]:
        """Requests that were answered in full, cancelled or refused."""
        return {*self.finished, *self.refused}

    @property
    def target(self) -> PretendedTarget:
        """The target of the only group."""
        (target,) = self.targets
        return target

    @property
    def step(self) -> RunStep | None:
        """The step in flight of the lowest group that has one."""
        return self.steps[min(self.steps)] if self.steps else None

    @property
    def target_joined(self) -> bool:
        """Whether the scheduler has a target group that lets sequences in."""
        return any(group.is_open for group in self.scheduler._state.groups)

    def join_target(self, group: int = 0, *, block_size: int = BLOCK_SIZE) -> None:
        """A fresh target group joins."""
        self.targets[group] = PretendedTarget(block_size)
        limits = EngineLimits(VOCAB_SIZE, self.max_model_len, block_size, self.num_blocks)
        self.shards[group] = TargetSession(limits)
        self._note_loss(group)
        self.send(
            TargetJoined(
                self.now,
                VOCAB_SIZE,
                self.max_model_len,
                block_size,
                self.num_blocks,
                group=group,
            )
        )

    def lose_target(self, group: int = 0) -> None:
        """A target group is lost, with its step in flight."""
        self._note_loss(group)
        self.send(TargetLost(self.now, group=group))

    def scale(self, num_groups: int) -> None:
        """The target is to have this number of groups. Further ones join later."""
        self.targets += [PretendedTarget() for _ in range(len(self.targets), num_groups)]
        self.send(TargetScaled(self.now, num_groups))

    def _note_loss(self, group: int) -> None:
        step = self.steps.pop(group, None)
        self.lost_steps.update(part.sequence_id for part in (step.slices if step else ()))
        running = self.scheduler._state.groups[group].batching.running.values()
        self.hits.update(one.sequence_id for one in running if one.kv.open_at_target)

    def answer(self, group: int | None = None) -> None:
        """Answer the step in flight of a group; None: of the only one."""
        step = self.steps.pop(min(self.steps) if group is None else group)
        seconds = self.step_seconds(sum(len(part.token_ids) for part in step.slices))
        target = self.targets[step.group]
        verdicts = target.run(step)
        done = StepDone(
            self.now,
            step.step,
            verdicts,
            seconds,
            group=step.group,
            prompt_logprobs=target.prompt_logprobs,
        )
        self.send(done)

    def draft(self, name: str) -> None:
        """Run one pass of a drafter, and deliver it at once."""
        self.send(Proposed(self.now, name, self.drafters[name].run_pass()))

    def check_text(self, sequence_id: int) -> None:
        """Check that the emitted tokens begin plain decoding's text, and end as all of it."""
        emitted, asked = self.emitted[sequence_id], self.requests[sequence_id]
        plain = plain_text(asked.prompt_token_ids, asked.spec.seed, asked.max_tokens)
        assert emitted == plain[: len(emitted)]
        end = self.finished.get(sequence_id)
        if end is not None and end.reason is not FinishReason.CANCELLED:
            assert emitted == plain
