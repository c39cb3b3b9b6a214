"""The scheduler: events in, instructions out. It does no I/O and reads no clock.

One step is in flight at a time. Whatever arrives meanwhile is kept, and the moment the verdicts
are there the next step goes out with all that is known by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from cluster.decoding.batching import Batching, Target
from cluster.decoding.drafters import Drafters
from cluster.decoding.events import (
    Admitted,
    Cancelled,
    DraftDeclined,
    DrafterJoined,
    DrafterLost,
    Event,
    Proposal,
    Proposed,
    SequenceVerdict,
    StepDone,
    TargetJoined,
    TargetLost,
    Tick,
)
from cluster.decoding.instructions import Emit, Finish, FinishReason, Instruction, RunStep, WakeAt
from cluster.decoding.sequence import Sequence
from paceline.errors import ProtocolError
from workers.engine.block_pool import BlockPool


@dataclass(slots=True)
class Totals:
    """Counts since the scheduler began."""

    steps: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    finished: int = 0
    dropped_proposals: int = 0


@dataclass(slots=True)
class _Outbox:
    """Instructions that wait until the next step is on its way: drafters first, then callers."""

    drafters: list[Instruction] = field(default_factory=list)
    callers: list[Instruction] = field(default_factory=list)


class Scheduler:
    """Owns every sequence, the block pool and the grants."""

    def __init__(
        self, *, max_num_seqs: int = 64, max_step_tokens: int = 512, wait_seconds: float = 1.0
    ) -> None:
        self._batching = Batching(
            max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens, wait_seconds=wait_seconds
        )
        self._drafters = Drafters()
        self._step: RunStep | None = None
        self._woken_for: float | None = None
        self.totals = Totals()

    @property
    def num_waiting(self) -> int:
        """Sequences that have no place in the batch."""
        return len(self._batching.waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._batching.running)

    def check_fits(self, prompt_length: int, max_tokens: int) -> None:
        """Raise PromptTooLongError when such a sequence could never be held by the target."""
        self._batching.check_fits(prompt_length, max_tokens)

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event; what to do now, the next step first.

        Raises ProtocolError, changing nothing, when a StepDone does not answer the step in flight.
        """
        out = _Outbox()
        match event:
            case Admitted():
                self._batching.waiting.append(Sequence.admitted(event.request, event.now))
            case Cancelled():
                self._cancel(event, out)
            case Proposed():
                self._propose(event)
            case DraftDeclined():
                self._decline(event, out)
            case StepDone():
                self._finish_step(event, out)
            case DrafterJoined():
                self._drafters.join(event.drafter, event.max_position)
                self._assign(out)
            case DrafterLost():
                self._drafters.lose(event.drafter, self._all())
                self._assign(out)
            case TargetJoined():
                self._join_target(event, out)
            case TargetLost():
                self._lose_target(event.now, out)
            case Tick():
                self._woken_for = None
        step = self._next_step(event.now, out)
        return [*([step] if step else []), *out.drafters, *out.callers]

    def check_integrity(self) -> None:
        """Assert every invariant. For tests."""
        self._batching.check_integrity()
        self._drafters.check_integrity(self._all())
        in_flight = {part.sequence_id for part in self._step.slices} if self._step else set()
        running = self._batching.running
        assert in_flight == {s.sequence_id for s in running.values() if s.in_flight is not None}

    def _all(self) -> Iterable[Sequence]:
        return chain(self._batching.waiting, self._batching.running.values())

    def _find(self, sequence_id: int) -> Sequence | None:
        running = self._batching.running.get(sequence_id)
        if running is not None:
            return running
        return next((s for s in self._batching.waiting if s.sequence_id == sequence_id), None)

    def _next_step(self, now: float, out: _Outbox) -> RunStep | None:
        """Admit and plan, if the target is free."""
        if self._step is not None:
            return None
        for sequence in self._batching.admit():
            self._drafters.assign(sequence, out.drafters)
        self._step = self._batching.plan(now)
        wake_at = self._batching.wake_at
        if wake_at is not None and wake_at != self._woken_for:
            out.callers.append(WakeAt(wake_at))
        self._woken_for = wake_at
        return self._step

    def _assign(self, out: _Outbox) -> None:
        for sequence in self._batching.running.values():
            self._drafters.assign(sequence, out.drafters)

    def _join_target(self, event: TargetJoined, out: _Outbox) -> None:
        if self._batching.target is not None:
            self._lose_target(event.now, out)
        self._batching.join_target(
            Target(
                vocab_size=event.vocab_size,
                max_model_len=event.max_model_len,
                block_size=event.block_size,
                pool=BlockPool(event.num_blocks),
            )
        )

    def _lose_target(self, now: float, out: _Outbox) -> None:
        self._step = None
        self._batching.lose_target()
        for sequence in [s for s in self._batching.waiting if s.cancelled]:
            self._finish(now, sequence, FinishReason.CANCELLED, out)

    def _cancel(self, event: Cancelled, out: _Outbox) -> None:
        sequence = self._find(event.sequence_id)
        if sequence is None:
            return
        sequence.cancelled = True
        if sequence.in_flight is None:
            self._finish(event.now, sequence, FinishReason.CANCELLED, out)

    def _decline(self, event: DraftDeclined, out: _Outbox) -> None:
        sequence = self._find(event.sequence_id)
        if sequence is not None and self._drafters.known(event.drafter):
            self._drafters.decline(event.drafter, sequence, out.drafters)

    def _propose(self, event: Proposed) -> None:
        for proposal in event.proposals:
            sequence = self._find(proposal.sequence_id)
            if sequence is not None and not self._attach(sequence, proposal):
                self.totals.dropped_proposals += 1

    def _attach(self, sequence: Sequence, proposal: Proposal) -> bool:
        target = self._batching.target
        granted = max(0, sequence.granted_until - proposal.base_length)
        token_ids = proposal.token_ids[:granted]
        if target is None or any(not 0 <= t < target.vocab_size for t in token_ids):
            return False
        if not sequence.path.attach(proposal.base_length, proposal.base_hash, token_ids):
            return False
        end = proposal.base_length + len(token_ids)
        if proposal.last and end == len(sequence.path.token_ids):
            sequence.draft_exhausted = True
        return True

    def _finish_step(self, event: StepDone, out: _Outbox) -> None:
        step = self._step
        if step is None or event.step != step.step:
            raise ProtocolError(f"step {event.step} was answered, but it is not in flight")
        self._check_verdicts(step, event.verdicts)
        self._step = None
        self.totals.steps += 1
        verdicts = iter(event.verdicts)
        for part in step.slices:
            sequence = self._batching.running[part.sequence_id]
            sequence.in_flight = None
            verdict = next(verdicts) if part.verdict else None
            if sequence.cancelled:
                sequence.path.unpin()
                self._finish(event.now, sequence, FinishReason.CANCELLED, out)
            elif verdict is None:
                sequence.kv_length = part.start + len(part.token_ids)
                sequence.path.unpin()
            else:
                self._commit(event.now, sequence, part.window, verdict, out)

    def _check_verdicts(self, step: RunStep, verdicts: tuple[SequenceVerdict, ...]) -> None:
        asked = [(part.sequence_id, part.window) for part in step.slices if part.verdict]
        if [sequence_id for sequence_id, _ in asked] != [v.sequence_id for v in verdicts]:
            raise ProtocolError(f"the verdicts of step {step.step} are not those of its slices")
        target = self._batching.target
        assert target is not None
        for (sequence_id, window), verdict in zip(asked, verdicts, strict=True):
            fits = verdict.num_accepted <= window and verdict.token_id < target.vocab_size
            if not fits or verdict.num_accepted < 0 or verdict.token_id < 0:
                raise ProtocolError(
                    f"the verdict of sequence {sequence_id} accepts {verdict.num_accepted} of "
                    f"{window} candidates and adds token {verdict.token_id} "
                    f"of a vocabulary of {target.vocab_size}"
                )

    def _commit(
        self, now: float, sequence: Sequence, window: int, verdict: SequenceVerdict, out: _Outbox
    ) -> None:
        offset, position = sequence.output, sequence.path.num_committed
        committed = sequence.path.commit(verdict.num_accepted, verdict.token_id)
        sequence.kv_length = sequence.path.num_committed - 1
        kept, reason = _cut(sequence, offset, committed)
        num_drafted = min(verdict.num_accepted, len(kept))
        self._count(now, sequence, window, len(kept), num_drafted)
        out.callers.append(Emit(sequence.sequence_id, offset, kept, num_drafted))
        if reason is not None:
            self._finish(now, sequence, reason, out)
            return
        sequence.ready_since = now
        if not sequence.path.num_candidates:
            sequence.draft_exhausted = False
        self._drafters.outcome(sequence, position, committed, out.drafters)

    def _count(
        self, now: float, sequence: Sequence, window: int, committed: int, accepted: int
    ) -> None:
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        sequence.steps += 1
        sequence.output += committed
        sequence.drafted += window
        sequence.accepted += accepted
        self.totals.committed += committed
        self.totals.drafted += window
        self.totals.accepted += accepted

    def _finish(self, now: float, sequence: Sequence, reason: FinishReason, out: _Outbox) -> None:
        self._batching.remove(sequence)
        self._drafters.release(sequence, out.drafters)
        self.totals.finished += 1
        out.callers.append(Finish(sequence.sequence_id, reason, sequence.stats(now)))


def _cut(
    sequence: Sequence, offset: int, committed: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """What of newly committed tokens the caller gets, and why the sequence ends there if it does.

    `offset` is the number of output tokens before them.
    """
    request = sequence.request
    room = request.max_tokens - offset
    kept, reason = committed, None
    if len(committed) >= room:
        kept, reason = committed[:room], FinishReason.LENGTH
    for index, token_id in enumerate(kept):
        if token_id in request.spec.end_token_ids:
            kept, reason = kept[: index + 1], FinishReason.STOP
            break
    if request.stop_scanner is not None:
        stop = request.stop_scanner.first_stop(kept)
        if stop is not None:
            kept, reason = kept[:stop], FinishReason.STOP
    return kept, reason
