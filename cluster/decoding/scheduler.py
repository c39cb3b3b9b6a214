"""The scheduler: events in, instructions out. It does no I/O and reads no clock.

Each target group has at most one step in flight. The scheduler keeps whatever arrives meanwhile.
When the verdicts arrive, the next step goes out with everything known by then. To send it early, an
event is handled in two phases. `steps_for` does what the next steps need and returns them.
`messages` does everything else and returns what drafters and callers are told.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.decoding.at_hand import MOST_DELAY, TRIED_AGAIN, DraftersAtHand
from cluster.decoding.batching import Batching, Target
from cluster.decoding.events import (
    Admitted,
    Cancelled,
    Event,
    Paused,
    Resumed,
    StepDone,
    TargetJoined,
    TargetLost,
    TargetScaled,
    Tick,
)
from cluster.decoding.instructions import FinishReason, Instruction, RunStep, WakeAt
from cluster.decoding.prefix_cache import PrefixCache
from cluster.decoding.proposals import take_draft_event
from cluster.decoding.sequence import Sequence
from cluster.decoding.state import DecodingState, Deferred, TargetGroup
from cluster.decoding.step_answers import Answer, check_verdicts, commit_answer, report_answer
from cluster.decoding.waiting import WaitingLine
from paceline.errors import (
    PromptTooLongError,
    ProtocolError,
    RequestFaultError,
)
from paceline.generation import SpeculationStats
from workers.engine.kv_blocks import KvKind


class Scheduler:
    """Owns every sequence, the block pools and the grants."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 64,
        max_step_tokens: int = 512,
        wait_seconds: float = 1.0,
        prefix_cache: bool = True,
        num_groups: int = 1,
        serves_auto: bool = True,
        at_hand: DraftersAtHand | None = None,
    ) -> None:
        """The target has `num_groups` groups. Their steps hold at most `max_step_tokens` tokens of
        at most `max_num_seqs` sequences.

        `wait_seconds`: upper bound on the wait of a policy that waits. `prefix_cache`: whether
        sequences of a group share KV blocks of equal prefixes. `serves_auto`: whether a request may
        have the policy `auto`, whose estimates take a tenth of the scheduler's time. `at_hand`: the
        drafters in this process; the scheduler calls them, and gets their answers at once.
        """
        self._prefix_cache = prefix_cache
        waiting = WaitingLine()

        def new_group(number: int) -> TargetGroup:
            batching = Batching(
                waiting,
                group=number,
                max_num_seqs=max_num_seqs,
                max_step_tokens=max_step_tokens,
                wait_seconds=wait_seconds,
            )
            return TargetGroup(number, batching)

        self._state = DecodingState(new_group, waiting, serves_auto=serves_auto)
        self._state.scale(0.0, num_groups)
        self._at_hand = at_hand
        self._undelayed = 0  # Steps in a row that did not wait for drafters at hand.
        self._woken_for: float | None = None
        # State of the event in progress: an answer not yet reported, messages to send, steps sent.
        self._answer: Answer | None = None
        self._out = Deferred()
        self._steps: list[RunStep] = []
        self._now = 0.0
        self.totals = self._state.totals
        self.utilization = self._state.utilization

    @property
    def num_waiting(self) -> int:
        """Sequences that have no place in a batch, paused ones included."""
        return len(self._state.waiting) + len(self._state.paused)

    @property
    def num_running(self) -> int:
        """Sequences that have a place in a batch."""
        return len(self._state.running)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence gave its KV blocks to an older one, to be computed again."""
        return sum(group.batching.preemptions for group in self._state.groups)

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens that were not prefilled because their KV was in the cache."""
        return sum(group.batching.hit_tokens for group in self._state.groups)

    @property
    def num_kv_blocks(self) -> int:
        """KV blocks of the groups that can step."""
        return sum(pool.num_blocks for pool in self._kv_pools())

    @property
    def num_kv_blocks_held(self) -> int:
        return sum(pool.num_blocks - pool.num_available for pool in self._kv_pools())

    def _kv_pools(self) -> list[PrefixCache]:
        targets = (group.batching.target for group in self._state.groups)
        return [target.kv for target in targets if target is not None]

    def is_busy(self, group: int) -> bool:
        """Whether sequences run in a target group, or leave it during a step."""
        batches = [one.batching for one in self._state.groups[group : group + 1]]
        return any(one.running or one.leaving for one in batches)

    def speculation(self) -> SpeculationStats:
        return self._state.speculation()

    def check_fits(self, prompt_length: int, max_tokens: int) -> None:
        """Raise PromptTooLongError if no step could ever hold such a sequence."""
        for group in self._state.groups:
            group.batching.check_fits(prompt_length, max_tokens)

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event. Returns what to do, steps first. Raises as `steps_for` does."""
        steps = self.steps_for(event)
        return [*steps, *self.messages()]

    def steps_for(self, event: Event) -> list[RunStep]:
        """Take an event in. Returns the steps to send now. Call `messages` before the next event.

        Raises ProtocolError, changing nothing, if a StepDone does not answer the step in flight.
        """
        assert self._answer is None, "an event before the rest of the last one"
        out = self._out
        self._take(event, out)
        self._now = event.now
        answer = self._answer
        if answer is not None and (len(self._state.groups) > 1 or not answer.is_all):
            self._report_answer()
        if answer is not None and self._at_hand is not None:
            self._draft_before_step(self._at_hand, answer, out)
        self._steps = self._next_steps(event.now, out)
        if self._answer is not None and not self._steps and self._answer.steers:
            # A sequence that waits for its drafter may get a policy that does not.
            self._report_answer()
            self._steps = self._next_steps(event.now, out)
        return self._steps

    def _take(self, event: Event, out: Deferred) -> None:
        match event:
            case Admitted():
                sequence = Sequence.admitted(event.request, event.now)
                if sequence.pilot is not None:
                    self._state.auto.admitted(sequence.pilot)
                    sequence.steer(sequence.pilot)
                self._state.waiting.append(sequence)
                self._refuse_what_never_fits([sequence], out)
            case Cancelled():
                self._cancel(event, out)
            case Paused():
                self._pause(event, out)
            case Resumed():
                self._resume(event, out)
            case StepDone():
                self._commit_answer(event, out)
            case TargetJoined():
                self._join_target(event, out)
            case TargetLost():
                self._lose_target(event.now, self._state.groups[event.group], out)
                self._state.forget_retired()
            case TargetScaled():
                self._state.scale(event.now, event.num_groups)
            case Tick():
                self._woken_for = None
            case _:
                take_draft_event(self._state, event, out)

    def _draft_before_step(self, at_hand: DraftersAtHand, answer: Answer, out: Deferred) -> None:
        """Have drafters at hand answer verdicts before the next step, if that hardly delays it."""
        served = sum(commit.sequence.drafter in at_hand.names for commit in answer.commits)
        if not served or at_hand.is_reading:
            return
        delay_ms, step_ms = 1000 * at_hand.delay_seconds * served, self._state.costs.step_ms
        is_long = step_ms > 0 and delay_ms > MOST_DELAY * step_ms
        if is_long and self._undelayed < TRIED_AGAIN:
            self._undelayed += 1
            return
        self._undelayed = 0
        with at_hand.before_step(served):
            self._report_answer()
            self._draft_at_hand(at_hand, out)

    def _draft_at_hand(self, at_hand: DraftersAtHand, out: Deferred) -> bool:
        """Tell drafters at hand what waits for them. Returns whether they answered anything."""
        answered = False
        for _ in range(1 + len(at_hand.names)):  # One that declines a sequence leaves it to others.
            own = [one for one in out.drafters if _drafter_of(one) in at_hand.names]
            if not own and (answered or not at_hand.has_work):
                break
            out.drafters = [one for one in out.drafters if _drafter_of(one) not in at_hand.names]
            answers = at_hand.heed(self._now, own)
            for event in answers:
                self._take(event, out)
            answered = answered or bool(answers)
        return answered

    def messages(self) -> list[Instruction]:
        """Do what the steps did not need. Returns messages to drafters, then to callers."""
        self._report_answer()
        out, self._out = self._out, Deferred()
        for step in self._steps:
            self._state.sent(self._now, step, out)
        self._steps = []
        waits = any(group.step is None and group.batching.running for group in self._state.groups)
        if self._at_hand is not None and self._draft_at_hand(self._at_hand, out) and waits:
            out.callers.append(WakeAt(self._now))  # A sequence may have waited for this.
            self._woken_for = self._now
        self.utilization.observe(self._now, at_work=self._state.at_work)
        return [*out.drafters, *out.callers]

    def _report_answer(self) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            report_answer(self._state, answer, self._out)

    def check_integrity(self) -> None:
        for sequence in self._state.paused.values():
            sequence.tree.check_integrity()
            assert sequence.paused
            assert sequence.kv.group is None
            assert not sequence.kv.block_table
            assert not sequence.replicas
            assert sequence.drafter is None
        for group in self._state.groups:
            group.check_integrity()
        self._state.drafters.check_integrity(self._state.sequences())

    def _next_steps(self, now: float, out: Deferred) -> list[RunStep]:
        """Let sequences in and plan a step for every free group."""
        free = [group for group in self._state.groups if group.step is None]
        if not free:
            return []
        if self._state.admit():
            self._report_answer()  # Drafters hear of outcomes before they hear of new sequences.
            self._state.assign(out)
        self._state.share_groups(out)
        steps = []
        for group in free:
            group.step = group.batching.plan(now)
            if group.step is not None:
                steps.append(group.step)
        wakes = [group.batching.wake_at for group in free]
        wake_at = min((time for time in wakes if time is not None), default=None)
        if wake_at is not None and wake_at != self._woken_for:
            out.callers.append(WakeAt(wake_at))
        self._woken_for = wake_at
        if wake_at is None and all(group.step is None for group in self._state.groups):
            # Time spent waiting for a drafter counts as a cost of tokens; idle time does not count.
            self._state.costs.pause()
        return steps

    def _join_target(self, event: TargetJoined, out: Deferred) -> None:
        group = self._state.groups[event.group]
        if group.joined:
            self._lose_target(event.now, group, out)
        kind = KvKind(event.block_size, event.dtype, event.checkpoint_digest)
        group.batching.join_target(
            Target(
                vocab_size=event.vocab_size,
                max_model_len=event.max_model_len,
                kv=PrefixCache(event.num_blocks, kind, enabled=self._prefix_cache),
            )
        )
        self._state.drafters.target_vocab_size = event.vocab_size
        self._refuse_what_never_fits(list(self._state.waiting), out)

    def _refuse_what_never_fits(self, waiting: Iterable[Sequence], out: Deferred) -> None:
        """Refuse waiting sequences that are too long for the present target.

        `check_fits` may have been called when there was another target, or none.
        """
        for sequence in waiting:
            request = sequence.request
            try:
                self.check_fits(len(request.prompt_token_ids), request.max_tokens)
            except PromptTooLongError as error:
                self._state.refuse(sequence, error, out)

    def _lose_target(self, now: float, group: TargetGroup, out: Deferred) -> None:
        step, group.step = group.step, None
        group.batching.lose_target()
        for sequence in [s for s in self._state.waiting if s.cancelled]:
            self._state.finish(now, sequence, FinishReason.CANCELLED, out)
        slices = step.slices if step is not None else ()
        for part in slices:
            self._suspect(part.sequence_id, group, out, alone=len(slices) == 1)
        for sequence in [s for s in self._state.waiting if s.paused]:
            self._state.pause(sequence, out)

    def _suspect(self, sequence_id: int, group: TargetGroup, out: Deferred, *, alone: bool) -> None:
        """The target was lost in a step of this sequence. Refuse it if it must be the cause."""
        sequence = self._state.find(sequence_id)
        if sequence is None:
            return
        lost_steps = self._state.waiting.suspects.lost(
            sequence_id,
            alone=alone,
            now=self.totals.steps,
            others_answered_at=group.answered_at,
        )
        if lost_steps is not None:
            error = RequestFaultError(
                f"the target was lost during {lost_steps} steps of this request in a row, the last "
                "of which had no other request; it is not tried again, and should not be sent "
                "again unchanged"
            )
            self._state.refuse(sequence, error, out)

    def _cancel(self, event: Cancelled, out: Deferred) -> None:
        sequence = self._state.find(event.sequence_id)
        if sequence is None:
            return
        sequence.cancelled = True
        if sequence.kv.in_flight is None or sequence.policy.replicates:
            self._state.finish(event.now, sequence, FinishReason.CANCELLED, out)

    def _pause(self, event: Paused, out: Deferred) -> None:
        sequence = self._state.find(event.sequence_id)
        if sequence is not None and not sequence.paused:
            self._state.pause(sequence, out)

    def _resume(self, event: Resumed, out: Deferred) -> None:
        sequence = self._state.find(event.sequence_id)
        if sequence is not None and sequence.paused:
            self._state.resume(event.now, sequence)
            self._refuse_what_never_fits([sequence], out)  # The target may have been replaced.
            self._state.assign(out)

    def _commit_answer(self, event: StepDone, out: Deferred) -> None:
        group = self._state.groups[event.group]
        step, batching = group.step, group.batching
        if step is None or event.step != step.step:
            raise ProtocolError(f"step {event.step} was answered, but it is not in flight")
        assert batching.target is not None
        check_verdicts(step, event.verdicts, batching.target.vocab_size)
        group.step = None
        self._answer = commit_answer(self._state, group, step, event, out)


def _drafter_of(instruction: Instruction) -> str | None:
    return getattr(instruction, "drafter", None)
