"""What the answer to a step does: sequences grow, counts and estimates are told."""

from __future__ import annotations

from cluster.decoding.batching import Batching
from cluster.decoding.counts import CountedVerdict, counted
from cluster.decoding.events import SequenceVerdict, StepDone
from cluster.decoding.group import Group
from cluster.decoding.instructions import Emit, FinishReason, RunStep, Slice
from cluster.decoding.sequence import Sequence
from cluster.decoding.state import DecodingState, Outbox
from cluster.decoding.verdicts import accepted_path, cut_at_end, gives_up_bonus


def take_answer(
    state: DecodingState, group: Group, step: RunStep, event: StepDone, out: Outbox
) -> None:
    """The step that was in flight in a group was answered, and its verdicts fit it."""
    batching = group.batching
    state.auto.answered(event, num_drafters=len(state.drafters.names))
    state.totals.steps += 1
    state.utilisation.stepped(event.step_seconds)
    committed_before = state.totals.counts.committed
    verdicts = iter(event.verdicts)
    for part in step.slices:
        sequence = batching.running[part.sequence_id]
        sequence.in_flight = None
        verdict = next(verdicts) if part.verdict else None
        if sequence.cancelled:
            sequence.tree.unpin()
            state.finish(event.now, sequence, FinishReason.CANCELLED, out)
        elif verdict is None:
            sequence.kv_length = part.start + len(part.token_ids)
            sequence.tree.unpin()
            batching.kv.keep(sequence)
        else:
            _commit(state, batching, event.now, sequence, part, verdict, out)
    state.drafters.stepped(event.now, state.running, out.drafters)
    prefill_tokens = batching.answered(step, event.step_seconds)
    state.totals.prefilled += prefill_tokens
    if not prefill_tokens:
        state.costs.add(
            event.now,
            candidates=sum(part.window for part in step.slices),
            step_seconds=event.step_seconds,
            tokens=state.totals.counts.committed - committed_before,
        )


def _commit(
    state: DecodingState,
    batching: Batching,
    now: float,
    sequence: Sequence,
    part: Slice,
    verdict: SequenceVerdict,
    out: Outbox,
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
    batching.kv.keep(sequence)
    kept, reason = cut_at_end(sequence, offset, committed)
    counted_verdict = counted(
        part,
        accepted=len(accepted),
        kept=len(kept),
        committed=len(committed),
        foresight=foresight,
    )
    _count(state, now, sequence, counted_verdict)
    num_drafted = counted_verdict.accepted
    out.callers.append(Emit(sequence.sequence_id, offset, kept, num_drafted))
    if reason is not None:
        state.finish(now, sequence, reason, out)
        return
    if sequence.pilot is not None:
        state.auto.judged(sequence.pilot, counted_verdict, now, sequence.drafter, tree)
        sequence.policy, sequence.window = sequence.pilot.policy, sequence.pilot.window
    sequence.ready_since = now
    sequence.draft_exhausted = False
    sequence.kept = tree.num_candidates
    state.drafters.outcome(sequence, position, committed, verdict.top_tokens, out.drafters)


def _count(state: DecodingState, now: float, sequence: Sequence, verdict: CountedVerdict) -> None:
    sequence.counts.add(verdict)
    state.totals.counts.add(verdict)
    if sequence.first_token_at is None:
        sequence.first_token_at = now
        sequence.first_tokens = verdict.committed
        sequence.since_first_token = state.utilisation.mark(now)
