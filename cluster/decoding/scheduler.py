"""The scheduler: events in, instructions out. It does no I/O and reads no clock.

One step is in flight at a time. Whatever arrives meanwhile is kept, and the moment the verdicts
are there the next step goes out with all that is known by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain

from cluster.decoding.auto import Controller
from cluster.decoding.batching import Batching, Target
from cluster.decoding.counts import CountedVerdict, counted
from cluster.decoding.drafters import Drafters
from cluster.decoding.events import (
    Admitted,
    Cancelled,
    DraftDeclined,
    DrafterJoined,
    DrafterLost,
    Event,
    MalformedProposal,
    Proposal,
    Proposed,
    SequenceVerdict,
    StepDone,
    TargetJoined,
    TargetLost,
    Tick,
)
from cluster.decoding.instructions import (
    Emit,
    Finish,
    FinishReason,
    Instruction,
    Refuse,
    RunStep,
    Slice,
    WakeAt,
)
from cluster.decoding.prefix_cache import PrefixCache
from cluster.decoding.sequence import Sequence
from cluster.decoding.step_costs import StepCosts
from cluster.decoding.totals import Totals
from cluster.decoding.utilisation import Utilisation
from cluster.decoding.verdicts import accepted_path, check_verdicts, cut_at_end, gives_up_bonus
from paceline.errors import PromptTooLongError, ProtocolError
from paceline.generation import SpeculationStats
from paceline.rules import Rule


@dataclass(slots=True)
class _Outbox:
    """Instructions that wait until the next step is on its way: drafters first, then callers."""

    drafters: list[Instruction] = field(default_factory=list)
    callers: list[Instruction] = field(default_factory=list)


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
        self._batching = Batching(
            max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens, wait_seconds=wait_seconds
        )
        self._costs = StepCosts()
        self._drafters = Drafters(self._costs)
        self._auto = Controller()
        self._step: RunStep | None = None
        self._woken_for: float | None = None
        self.totals = Totals()
        self.utilisation = Utilisation()

    @property
    def num_waiting(self) -> int:
        """Sequences that have no place in the batch."""
        return len(self._batching.waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._batching.running)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence gave its KV blocks to an older one, to be computed again."""
        return self._batching.preemptions

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens that did not need to be prefilled, since their KV was there already."""
        return self._batching.hit_tokens

    def speculation(self) -> SpeculationStats:
        """How drafting went, of all requests together."""
        shares = self.utilisation.of_all(self._drafters.names)
        return replace(
            self.totals.counts.speculation(),
            target_idle=shares.target_idle,
            drafter_idle=shares.drafter_idle,
            efficiency=shares.efficiency,
            choices=dict(self._auto.choices),
            estimates=self._auto.beliefs.estimates(),
        )

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
                sequence = Sequence.admitted(event.request, event.now)
                if sequence.pilot is not None:
                    self._auto.admitted(sequence.pilot)
                    sequence.policy, sequence.window = sequence.pilot.policy, sequence.pilot.window
                self._batching.waiting.append(sequence)
                self._refuse_what_never_fits(out)
            case Cancelled():
                self._cancel(event, out)
            case Proposed():
                self._propose(event)
            case MalformedProposal():
                self.totals.malformed_proposals += 1
                self._drafters.blame(event.drafter, self._all(), out.drafters)
                self._assign(out)
            case DraftDeclined():
                self._decline(event, out)
            case StepDone():
                self._finish_step(event, out)
            case DrafterJoined():
                self._drafters.join(event)
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
        self.utilisation.observe(event.now, at_work=self._batching.has_work)
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
        if self._batching.admit():
            self._assign(out)
        self._step = self._batching.plan(now)
        if self._step is not None:
            self._auto.beliefs.sent(now, self._step)
        for part in self._step.slices if self._step else ():
            sequence = self._batching.running[part.sequence_id]
            if sequence.policy.grants_by_step:
                self._drafters.grant(sequence, out.drafters)
        wake_at = self._batching.wake_at
        if wake_at is not None and wake_at != self._woken_for:
            out.callers.append(WakeAt(wake_at))
        self._woken_for = wake_at
        if self._step is None and self._batching.wake_at is None:
            # Waiting for a drafter is part of what tokens cost; having nothing to do is not.
            self._costs.pause()
        return self._step

    def _assign(self, out: _Outbox) -> None:
        running = self._batching.running.values()
        self._drafters.share_out(running, out.drafters)  # those who have several give some back
        for sequence in running:
            self._drafters.assign(sequence, out.drafters)
        self._drafters.share_out(running, out.drafters)

    def _join_target(self, event: TargetJoined, out: _Outbox) -> None:
        if self._batching.target is not None:
            self._lose_target(event.now, out)
        self._batching.join_target(
            Target(
                vocab_size=event.vocab_size,
                max_model_len=event.max_model_len,
                kv=PrefixCache(event.num_blocks, event.block_size, enabled=self._prefix_cache),
            )
        )
        self._refuse_what_never_fits(out)

    def _refuse_what_never_fits(self, out: _Outbox) -> None:
        """The caller asked `check_fits`, but of another target perhaps, or of none."""
        for sequence in list(self._batching.waiting):
            request = sequence.request
            try:
                self.check_fits(len(request.prompt_token_ids), request.max_tokens)
            except PromptTooLongError as error:
                self._batching.remove(sequence)
                self._drafters.release(sequence, out.drafters)
                out.callers.append(Refuse(sequence.sequence_id, error))

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
        self.utilisation.drafted(event.drafter, event.believable_seconds)
        drafted = any(proposal.token_ids for proposal in event.proposals)
        self._drafters.heard(event.now, event.drafter, event.believable_seconds, drafted=drafted)
        self._auto.beliefs.drafted(event)
        for proposal in event.proposals:
            sequence = self._find(proposal.sequence_id)
            if sequence is None:
                continue
            repeats = sequence.tree.repeats
            if not self._attach(event.drafter, sequence, proposal):
                self.totals.dropped_proposals += 1
            elif sequence.pilot is not None and sequence.tree.num_candidates:
                self._auto.beliefs.attached(sequence.pilot, event)
            new = len(proposal.token_ids) - (sequence.tree.repeats - repeats)
            sequence.drafted_by.add(event.drafter)
            sequence.counts.proposed += new
            self.totals.counts.proposed += new

    def _attach(self, drafter: str, sequence: Sequence, proposal: Proposal) -> bool:
        target = self._batching.target
        if target is None or any(not 0 <= t < target.vocab_size for t in proposal.token_ids):
            return False
        leads = drafter not in sequence.helpers
        is_merged = sequence.request.merge and not leads
        coupled = sequence.request.spec.rule is Rule.COUPLED
        if not (coupled or drafter == sequence.drafter or is_merged):
            # Only the coupled rule may mix candidates of several drafters as they come, and the
            # one-hot rule those of drafters that are merged.
            return False
        if not sequence.tree.attach(
            proposal,
            until_position=sequence.granted_until,
            max_nodes=sequence.granted_nodes,
            leads=leads,
        ):
            return False
        if proposal.last and leads:
            sequence.draft_exhausted = True
        if proposal.stopping_state:
            sequence.stopping_state = proposal.stopping_state
        return True

    def _finish_step(self, event: StepDone, out: _Outbox) -> None:
        step = self._step
        if step is None or event.step != step.step:
            raise ProtocolError(f"step {event.step} was answered, but it is not in flight")
        target = self._batching.target
        assert target is not None
        check_verdicts(step, event.verdicts, self._batching.running, target.vocab_size)
        self._step = None
        self._auto.answered(
            event,
            tokens_per_ms=self._costs.tokens_per_ms,
            num_drafters=len(self._drafters.names),
        )
        self.totals.steps += 1
        self.utilisation.stepped(event.step_seconds)
        committed_before = self.totals.counts.committed
        verdicts = iter(event.verdicts)
        for part in step.slices:
            sequence = self._batching.running[part.sequence_id]
            sequence.in_flight = None
            verdict = next(verdicts) if part.verdict else None
            if sequence.cancelled:
                sequence.tree.unpin()
                self._finish(event.now, sequence, FinishReason.CANCELLED, out)
            elif verdict is None:
                sequence.kv_length = part.start + len(part.token_ids)
                sequence.tree.unpin()
                self._batching.keep(sequence)
            else:
                self._commit(event.now, sequence, part, verdict, out)
        self._drafters.stepped(event.now, self._batching.running.values(), out.drafters)
        prefill_tokens = self._batching.answered(step, event.step_seconds)
        self.totals.prefilled += prefill_tokens
        if not prefill_tokens:
            self._costs.add(
                event.now,
                candidates=sum(part.window for part in step.slices),
                step_seconds=event.step_seconds,
                tokens=self.totals.counts.committed - committed_before,
            )

    def _commit(
        self,
        now: float,
        sequence: Sequence,
        part: Slice,
        verdict: SequenceVerdict,
        out: _Outbox,
    ) -> None:
        tree, offset, position = (
            sequence.tree,
            sequence.counts.committed,
            sequence.tree.num_committed,
        )
        accepted = accepted_path(verdict)
        token_id = None if gives_up_bonus(sequence, accepted) else verdict.token_id
        foresight = tree.foresight(accepted, token_id)
        committed = tree.commit(accepted, token_id)
        sequence.kv_length = tree.num_committed - 1
        sequence.kv_moves = tuple(
            (position + index, position + place)
            for place, index in enumerate(accepted)
            if index != place
        )
        if sequence.kv_moves:
            # A node off its own position was summed in another order; so is what sees it.
            sequence.plain_until = min(sequence.plain_until, position)
        self._batching.keep(sequence)
        kept, reason = cut_at_end(sequence, offset, committed)
        counted_verdict = counted(
            part,
            accepted=len(accepted),
            kept=len(kept),
            committed=len(committed),
            foresight=foresight,
        )
        self._count(now, sequence, counted_verdict)
        num_drafted = counted_verdict.accepted
        out.callers.append(Emit(sequence.sequence_id, offset, kept, num_drafted))
        if reason is not None:
            self._finish(now, sequence, reason, out)
            return
        if sequence.pilot is not None:
            self._auto.judged(sequence.pilot, counted_verdict, now, sequence.drafter, tree)
            sequence.policy, sequence.window = sequence.pilot.policy, sequence.pilot.window
        sequence.ready_since = now
        sequence.draft_exhausted = False
        sequence.kept = tree.num_candidates
        self._drafters.outcome(sequence, position, committed, verdict.top_tokens, out.drafters)

    def _count(self, now: float, sequence: Sequence, verdict: CountedVerdict) -> None:
        sequence.counts.add(verdict)
        self.totals.counts.add(verdict)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            sequence.first_tokens = verdict.committed
            sequence.since_first_token = self.utilisation.mark(now)

    def _finish(self, now: float, sequence: Sequence, reason: FinishReason, out: _Outbox) -> None:
        self._batching.remove(sequence)
        self._drafters.release(sequence, out.drafters)
        self.totals.finished += 1
        out.callers.append(
            Finish(sequence.sequence_id, reason, sequence.stats(now, self.utilisation))
        )
