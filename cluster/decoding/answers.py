"""What the answer to a step does: sequences grow, counts and estimates are told."""

from __future__ import annotations

from cluster.decoding.batching import Batching
from cluster.decoding.counts import CountedVerdict, Foresight, counted
from cluster.decoding.events import SequenceVerdict, StepDone
from cluster.decoding.group import Group
from cluster.decoding.instructions import Emit, FinishReason, RunStep, Slice
from cluster.decoding.replicas import told_by
from cluster.decoding.sequence import Replica, Sequence
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
        verdict = next(verdicts) if part.verdict else None
        if part.sequence_id in batching.leaving:
            batching.left(part.sequence_id)
            continue
        sequence = batching.running[part.sequence_id]
        sequence.kv.in_flight = None
        if sequence.cancelled:
            sequence.tree.unpin()
            state.finish(event.now, sequence, FinishReason.CANCELLED, out)
        elif verdict is None:
            sequence.kv.length = part.start + len(part.token_ids)
            sequence.tree.unpin()
            batching.kv.keep(sequence)
        elif sequence.policy.replicates:
            _commit_what_is_new(state, batching, event.now, sequence, part, verdict, out)
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
    sequence.kv.length = tree.num_committed - 1
    sequence.kv.moves = tuple(
        (position + index, position + place)
        for place, index in enumerate(accepted)
        if index != place
    )
    if sequence.kv.moves:
        # A node off its own position was summed in another order; so is what sees it.
        sequence.kv.plain_until = min(sequence.kv.plain_until, position)
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
    _go_on(now, sequence)
    state.drafters.outcome(sequence, position, committed, verdict.top_tokens, out.drafters)


def _commit_what_is_new(
    state: DecodingState,
    batching: Batching,
    now: float,
    member: Sequence,
    part: Slice,
    verdict: SequenceVerdict,
    out: Outbox,
) -> None:
    """Of a sequence that several groups verify: others may have told it already (replicas.py)."""
    sequence = member.lead if isinstance(member, Replica) else member
    tree, offset, position = sequence.tree, sequence.counts.committed, sequence.tree.num_committed
    told = told_by(tree, part, verdict.num_accepted, verdict.token_id)
    member.kv.length = told.kv_length
    foresight = Foresight.NOTHING
    if told.token_ids:
        tree.advance(told.token_ids[:-1])
        foresight = tree.foresight((), told.token_ids[-1])
        tree.advance(told.token_ids[-1:])
    batching.kv.keep(member)
    kept, reason = cut_at_end(sequence, offset, told.token_ids) if told.token_ids else ((), None)
    counted_verdict = told.counted(len(kept), foresight)
    _count(state, now, sequence, counted_verdict)
    if not told.token_ids:
        return
    out.callers.append(Emit(sequence.sequence_id, offset, kept, counted_verdict.accepted))
    if reason is not None:
        state.finish(now, sequence, reason, out)
        return
    _go_on(now, sequence)
    state.drafters.outcome(sequence, position, told.token_ids, verdict.top_tokens, out.drafters)


def _go_on(now: float, sequence: Sequence) -> None:
    """The next window may begin."""
    sequence.ready_since = now
    sequence.draft_exhausted = False
    sequence.kept = sequence.tree.num_candidates


def _count(state: DecodingState, now: float, sequence: Sequence, verdict: CountedVerdict) -> None:
    sequence.lost_steps = 0
    sequence.counts.add(verdict)
    state.totals.counts.add(verdict)
    if sequence.first_token_at is None:
        sequence.first_token_at = now
        sequence.first_tokens = verdict.committed
        sequence.since_first_token = state.utilisation.mark(now)
