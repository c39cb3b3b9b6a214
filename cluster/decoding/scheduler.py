"""The scheduler: events in, instructions out. It does no I/O and reads no clock.

One step is in flight at a time. Whatever arrives meanwhile is kept, and the moment the verdicts
are there the next step goes out with all that is known by then.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.decoding.answers import take_answer
from cluster.decoding.batching import Batching, Target
from cluster.decoding.events import (
    Admitted,
    Cancelled,
    DraftDeclined,
    DrafterJoined,
    DrafterLost,
    Event,
    MalformedProposal,
    Proposed,
    StepDone,
    TargetJoined,
    TargetLost,
    Tick,
)
from cluster.decoding.instructions import FinishReason, Instruction, Refuse, RunStep, WakeAt
from cluster.decoding.prefix_cache import PrefixCache
from cluster.decoding.proposals import take_proposals
from cluster.decoding.sequence import Sequence
from cluster.decoding.state import DecodingState, Outbox
from cluster.decoding.verdicts import check_verdicts
from paceline.errors import PromptTooLongError, ProtocolError
from paceline.generation import SpeculationStats


class Scheduler:
    """Owns every sequence, the block pool and the grants."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 64,
        max_step_tokens: int = 512,
        wait_seconds: float = 1.0,
        prefix_cache: bool = True,
    ) -> None:
        """`prefix_cache`: whether sequences share KV blocks of equal prefixes."""
        self._prefix_cache = prefix_cache
        self._state = DecodingState(
            Batching(
                max_num_seqs=max_num_seqs,
                max_step_tokens=max_step_tokens,
                wait_seconds=wait_seconds,
            )
        )
        self._step: RunStep | None = None
        self._woken_for: float | None = None
        self.totals = self._state.totals
        self.utilisation = self._state.utilisation

    @property
    def num_waiting(self) -> int:
        """Sequences that have no place in the batch."""
        return len(self._state.batching.waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._state.batching.running)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence gave its KV blocks to an older one, to be computed again."""
        return self._state.batching.preemptions

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens that did not need to be prefilled, since their KV was there already."""
        return self._state.batching.hit_tokens

    def speculation(self) -> SpeculationStats:
        """How drafting went, of all requests together."""
        shares = self.utilisation.of_all(self._state.drafters.names)
        return replace(
            self.totals.counts.speculation(),
            target_idle=shares.target_idle,
            drafter_idle=shares.drafter_idle,
            efficiency=shares.efficiency,
            choices=dict(self._state.auto.choices),
            estimates=self._state.auto.beliefs.estimates(),
        )

    def check_fits(self, prompt_length: int, max_tokens: int) -> None:
        """Raise PromptTooLongError when such a sequence could never be held by the target."""
        self._state.batching.check_fits(prompt_length, max_tokens)

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event; what to do now, the next step first.

        Raises ProtocolError, changing nothing, when a StepDone does not answer the step in flight.
        """
        out = Outbox()
        match event:
            case Admitted():
                sequence = Sequence.admitted(event.request, event.now)
                if sequence.pilot is not None:
                    self._state.auto.admitted(sequence.pilot)
                    sequence.policy, sequence.window = sequence.pilot.policy, sequence.pilot.window
                self._state.batching.waiting.append(sequence)
                self._refuse_what_never_fits(out)
            case Cancelled():
                self._cancel(event, out)
            case Proposed():
                take_proposals(self._state, event)
            case MalformedProposal():
                self.totals.malformed_proposals += 1
                self._state.drafters.blame(event.drafter, self._state.sequences(), out.drafters)
                self._state.assign(out)
            case DraftDeclined():
                self._decline(event, out)
            case StepDone():
                self._take_answer(event, out)
            case DrafterJoined():
                self._state.drafters.join(event)
                self._state.assign(out)
            case DrafterLost():
                self._state.drafters.lose(event.drafter, self._state.sequences())
                self._state.assign(out)
            case TargetJoined():
                self._join_target(event, out)
            case TargetLost():
                self._lose_target(event.now, out)
            case Tick():
                self._woken_for = None
        step = self._next_step(event.now, out)
        self.utilisation.observe(event.now, at_work=self._state.batching.has_work)
        return [*([step] if step else []), *out.drafters, *out.callers]

    def check_integrity(self) -> None:
        """Assert every invariant. For tests."""
        self._state.batching.check_integrity()
        self._state.drafters.check_integrity(self._state.sequences())
        in_flight = {part.sequence_id for part in self._step.slices} if self._step else set()
        running = self._state.batching.running
        assert in_flight == {s.sequence_id for s in running.values() if s.in_flight is not None}

    def _next_step(self, now: float, out: Outbox) -> RunStep | None:
        """Admit and plan, if the target is free."""
        if self._step is not None:
            return None
        if self._state.batching.admit():
            self._state.assign(out)
        self._step = self._state.batching.plan(now)
        if self._step is not None:
            self._state.auto.beliefs.sent(now, self._step)
        for part in self._step.slices if self._step else ():
            sequence = self._state.batching.running[part.sequence_id]
            if sequence.policy.grants_by_step:
                self._state.drafters.grant(sequence, out.drafters)
        wake_at = self._state.batching.wake_at
        if wake_at is not None and wake_at != self._woken_for:
            out.callers.append(WakeAt(wake_at))
        self._woken_for = wake_at
        if self._step is None and self._state.batching.wake_at is None:
            # Waiting for a drafter is part of what tokens cost; having nothing to do is not.
            self._state.costs.pause()
        return self._step

    def _join_target(self, event: TargetJoined, out: Outbox) -> None:
        if self._state.batching.target is not None:
            self._lose_target(event.now, out)
        self._state.batching.join_target(
            Target(
                vocab_size=event.vocab_size,
                max_model_len=event.max_model_len,
                kv=PrefixCache(event.num_blocks, event.block_size, enabled=self._prefix_cache),
            )
        )
        self._refuse_what_never_fits(out)

    def _refuse_what_never_fits(self, out: Outbox) -> None:
        """The caller asked `check_fits`, but of another target perhaps, or of none."""
        for sequence in list(self._state.batching.waiting):
            request = sequence.request
            try:
                self.check_fits(len(request.prompt_token_ids), request.max_tokens)
            except PromptTooLongError as error:
                self._state.batching.remove(sequence)
                self._state.drafters.release(sequence, out.drafters)
                out.callers.append(Refuse(sequence.sequence_id, error))

    def _lose_target(self, now: float, out: Outbox) -> None:
        self._step = None
        self._state.batching.lose_target()
        for sequence in [s for s in self._state.batching.waiting if s.cancelled]:
            self._state.finish(now, sequence, FinishReason.CANCELLED, out)

    def _cancel(self, event: Cancelled, out: Outbox) -> None:
        sequence = self._state.find(event.sequence_id)
        if sequence is None:
            return
        sequence.cancelled = True
        if sequence.in_flight is None:
            self._state.finish(event.now, sequence, FinishReason.CANCELLED, out)

    def _decline(self, event: DraftDeclined, out: Outbox) -> None:
        sequence = self._state.find(event.sequence_id)
        if sequence is not None and self._state.drafters.known(event.drafter):
            self._state.drafters.decline(event.drafter, sequence, out.drafters)

    def _take_answer(self, event: StepDone, out: Outbox) -> None:
        step, batching = self._step, self._state.batching
        if step is None or event.step != step.step:
            raise ProtocolError(f"step {event.step} was answered, but it is not in flight")
        assert batching.target is not None
        check_verdicts(step, event.verdicts, batching.running, batching.target.vocab_size)
        self._step = None
        take_answer(self._state, step, event, out)
