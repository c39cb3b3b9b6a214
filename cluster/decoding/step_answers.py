"""Handles the answer to a step: checks that it fits the step, commits tokens, ends sequences.

`commit_answer` does what the next step needs: it commits the tokens. `report_answer` follows once
that step has been sent: counts, estimates, and messages to drafters and callers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.decoding.batching import Batching
from cluster.decoding.counts import CountedVerdict, Foresight, counted
from cluster.decoding.events import SequenceVerdict, StepDone
from cluster.decoding.instructions import Emit, FinishReason, RunStep, Slice
from cluster.decoding.replicas import Told, told_by
from cluster.decoding.sequence import Refusal, Replica, Sequence
from cluster.decoding.state import DecodingState, Deferred, TargetGroup
from cluster.decoding.structures import note_committed
from paceline.errors import ProtocolError, RequestFaultError
from workers.verification.rule import rule_named


@dataclass(slots=True)
class Commit:
    """What a verdict committed for a sequence.

    `offset`: output tokens before it. `position`: tokens before it, the prompt's included. `told`:
    set for a sequence that several groups verify.
    """

    sequence: Sequence
    part: Slice
    verdict: SequenceVerdict
    offset: int
    position: int
    token_ids: tuple[int, ...]
    foresight: Foresight
    told: Told | None = None

    def counted(self, kept: int) -> CountedVerdict:
        """The verdict as it is counted. `kept`: its tokens up to the end of the sequence."""
        if self.told is not None:
            return self.told.counted(kept, self.foresight)
        return counted(
            self.part,
            path=accepted_path(self.verdict),
            kept=kept,
            committed=len(self.token_ids),
            foresight=self.foresight,
        )

    def emit(self, kept: tuple[int, ...], verdict: CountedVerdict) -> Emit:
        """What the caller gets. `kept`: the tokens up to the end of the sequence."""
        emit = Emit(self.sequence.sequence_id, self.offset, kept, verdict.accepted)
        if self.verdict.logprobs:
            # Those of a verdict on several groups' tokens may begin before what is new here.
            path = len(accepted_path(self.verdict)) + 1
            first = path - len(self.token_ids) if self.told is not None else 0
            emit.logprobs = self.verdict.logprobs[first : first + len(kept)]
        if self.sequence.request.tells_refused and self.told is None:
            accepted = accepted_path(self.verdict)
            if len(kept) > len(accepted):  # Else its last token is a candidate.
                emit.refused = refused_after(self.part, accepted)
        return emit


@dataclass(slots=True)
class Answer:
    """An answered step. Its verdicts are committed. `commits`: not yet reported to anyone."""

    event: StepDone
    step: RunStep
    batching: Batching
    committed_before: int
    commits: list[Commit] = field(default_factory=list)

    @property
    def is_all(self) -> bool:
        """Whether every sequence of the batch was in the step, or waits for its drafter.

        If so, the next step holds no others, since none is prefilled. A sequence with a pilot may
        change its policy, and with it whether it waits.
        """
        running = self.batching.running
        if len(self.commits) == len(running):
            return True
        return not any(one.prefilling or one.pilot is not None for one in running.values())

    @property
    def steers(self) -> bool:
        """Whether reporting the answer may change a sequence's policy."""
        return any(commit.sequence.pilot is not None for commit in self.commits)


def commit_answer(
    state: DecodingState, group: TargetGroup, step: RunStep, event: StepDone, out: Deferred
) -> Answer:
    """Commit the verdicts on a group's step in flight. They must fit the step.

    `report_answer` must follow before the next event.
    """
    batching = group.batching
    state.totals.steps += 1
    state.utilization.stepped(event.step_seconds)
    answer = Answer(event, step, batching, state.totals.counts.committed)
    verdicts = iter(event.verdicts)
    suspects = state.waiting.suspects
    any_suspects = len(suspects) > 0
    cleared = not any_suspects
    for part in step.slices:
        verdict = next(verdicts) if part.verdict else None
        if part.sequence_id in batching.leaving:
            batching.left(part.sequence_id)
            continue
        sequence = batching.running[part.sequence_id]
        sequence.kv.in_flight = None
        found = event.prompt_logprobs.get(part.sequence_id)
        if found and (new := sequence.take_prompt_logprobs(part.start, found)):
            out.callers.append(Emit(part.sequence_id, 0, (), 0, prompt_logprobs=new))
        if sequence.cancelled:
            sequence.tree.unpin()
            state.finish(event.now, sequence, FinishReason.CANCELLED, out)
        elif verdict is not None and verdict.error is not None:
            _fail(state, batching, sequence, part, verdict.error, out)
        elif verdict is None:
            sequence.kv.length = part.start + len(part.token_ids)
            sequence.tree.unpin()
            batching.kv.keep(sequence)
        else:
            if any_suspects:
                cleared |= suspects.answered(part.sequence_id)
            if sequence.policy.replicates:
                _commit_what_is_new(state, answer, sequence, part, verdict, out)
            else:
                _commit(state, answer, sequence, part, verdict, out)
        if sequence.paused and state.find(sequence.sequence_id) is sequence:
            state.pause(sequence, out)
    if cleared and event.verdicts:
        group.answered_at = state.totals.steps
    return answer


def _fail(
    state: DecodingState,
    batching: Batching,
    sequence: Sequence,
    part: Slice,
    reason: str,
    out: Deferred,
) -> None:
    """Handle an error in place of a verdict. What the target computed is not usable.

    A candidate may have caused the error. So a sequence that had candidates is computed again
    without them, and without the drafters that proposed them. Rules that toss coins do not allow
    this, because the token drawn instead must not depend on a candidate. Under these rules, and if
    there was no candidate, the request is refused.
    """
    batching.kv.forget(sequence)
    lead = sequence.lead if isinstance(sequence, Replica) else sequence
    if part.window and rule_named(lead.request.spec.rule).shares_noise:
        lead.declined_by |= {name: Refusal(math.inf, 0.0) for name in lead.team}
        state.drafters.release(lead, out.drafters)
        state.drop_replicas_of(lead)
        lead.forget_candidates()
        lead.matcher, lead.foretells = None, False
        if lead is sequence:
            batching.give_back(lead)
        return
    error = RequestFaultError(
        f"the target cannot decode this request: {reason}. Sent again unchanged it would fail again"
    )
    state.refuse(lead, error, out)


def report_answer(state: DecodingState, answer: Answer, out: Deferred) -> None:
    """Count what was committed, tell callers and drafters of it, and learn the step's time."""
    event, step = answer.event, answer.step
    if state.auto.observes:
        _tell_auto(state, answer)
    for commit in answer.commits:
        sequence, token_ids = commit.sequence, commit.token_ids
        verdict = commit.counted(len(token_ids))
        _count(state, event.now, sequence, verdict)
        out.callers.append(commit.emit(token_ids, verdict))
        if sequence.pilot is not None:
            state.auto.judged(sequence.pilot, verdict, event.now, sequence.drafter, sequence.tree)
            sequence.steer(sequence.pilot)
        state.drafters.outcome(
            sequence, commit.position, token_ids, commit.verdict.top_tokens, out.drafters
        )
        prediction = sequence.request.prediction
        if sequence.foretells and prediction is not None and prediction.is_given_up:
            sequence.foretells = False
            state.drafters.assign(sequence, out.drafters)
    for fed in event.fed:
        prefilled = answer.batching.running.get(fed.sequence_id)
        if prefilled is not None:
            state.drafters.teach(prefilled, fed.top_tokens, out.drafters)
    state.drafters.stepped(event, state.running, out.drafters)
    prefill_tokens = answer.batching.answered(step, event.step_seconds)
    state.totals.prefilled += prefill_tokens
    if not prefill_tokens and (event.step_seconds or step.step):
        state.costs.add(
            event.now,
            candidates=sum(part.window for part in step.slices),
            step_seconds=event.step_seconds,
            tokens=state.totals.counts.committed - answer.committed_before,
        )


def _tell_auto(state: DecodingState, answer: Answer) -> None:
    """Tell policy `auto` of a step and of the sequences of its group."""
    running = answer.batching.running.values()
    decoding = [one for one in running if not one.prefilling]
    leads = [one.lead if isinstance(one, Replica) else one for one in decoding]
    state.auto.answered(
        answer.event,
        [one.pilot for one in leads if one.pilot is not None],
        coming=len(running) - len(decoding),
        drafters=len(state.drafters.names),
        groups=state.groups_each,
    )


def _commit(
    state: DecodingState,
    answer: Answer,
    sequence: Sequence,
    part: Slice,
    verdict: SequenceVerdict,
    out: Deferred,
) -> None:
    tree, batching = sequence.tree, answer.batching
    position = tree.num_committed
    offset = position - sequence.request.spec.prompt_length
    accepted = accepted_path(verdict)
    token_id = None if gives_up_bonus(sequence, accepted) else verdict.token_id
    foresight = tree.foresight(accepted, token_id)
    committed = tree.commit(accepted, token_id)
    sequence.kv.length = tree.num_committed - 1
    if part.parents:
        sequence.kv.moves = tuple(
            (position + index, position + place)
            for place, index in enumerate(accepted)
            if index != place
        )
        if sequence.kv.moves:
            # The KV of a moved node was summed in another order, and so was all KV after it.
            sequence.kv.plain_until = min(sequence.kv.plain_until, position)
    batching.kv.keep(sequence)
    commit = Commit(sequence, part, verdict, offset, position, committed, foresight)
    _go_on_or_end(state, answer, commit, out)


def _commit_what_is_new(
    state: DecodingState,
    answer: Answer,
    member: Sequence,
    part: Slice,
    verdict: SequenceVerdict,
    out: Deferred,
) -> None:
    """Commit a verdict where several groups verify. Others may have said the same (replicas.py)."""
    sequence = member.lead if isinstance(member, Replica) else member
    tree, position = sequence.tree, sequence.tree.num_committed
    offset = position - sequence.request.spec.prompt_length
    told = told_by(tree, part, verdict.num_accepted, verdict.token_id)
    member.kv.length = told.kv_length
    foresight = Foresight.NOTHING
    if told.token_ids:
        tree.advance(told.token_ids[:-1])
        foresight = tree.foresight((), told.token_ids[-1])
        tree.advance(told.token_ids[-1:])
    answer.batching.kv.keep(member)
    commit = Commit(sequence, part, verdict, offset, position, told.token_ids, foresight, told)
    if told.token_ids:
        _go_on_or_end(state, answer, commit, out)
        return
    _count(state, answer.event.now, sequence, commit.counted(0))
    if sequence.pilot is not None:
        sequence.steer(sequence.pilot)  # It may have had to wait for this.


def _go_on_or_end(state: DecodingState, answer: Answer, commit: Commit, out: Deferred) -> None:
    """Make the sequence ready for its next window, unless it ends here or is paused."""
    sequence, now = commit.sequence, answer.event.now
    kept, reason = cut_at_end(sequence, commit.offset, commit.token_ids)
    if reason is None and not sequence.paused:
        sequence.make_ready(now)
        note_committed(sequence, commit.token_ids)
        sequence.follow_prediction(len(commit.token_ids))
        answer.commits.append(commit)
        return
    if reason is None:
        note_committed(sequence, commit.token_ids)
        sequence.follow_prediction(len(commit.token_ids))
    else:
        sequence.follow_prediction(len(commit.token_ids), len(kept))
    verdict = commit.counted(len(kept))
    _count(state, now, sequence, verdict)
    out.callers.append(commit.emit(kept, verdict))
    if reason is not None:
        state.finish(now, sequence, reason, out)


def _count(state: DecodingState, now: float, sequence: Sequence, verdict: CountedVerdict) -> None:
    sequence.counts.add(verdict)
    state.totals.counts.add(verdict)
    if sequence.first_token_at is None:
        sequence.first_token_at = now
        sequence.first_tokens = verdict.committed
        sequence.since_first_token = state.utilization.mark(now)


def check_verdicts(step: RunStep, verdicts: Iterable[SequenceVerdict], vocab_size: int) -> None:
    """Raise ProtocolError unless the verdicts answer the step.

    Each must belong to a slice that asks for one and accept a path of its window. An error in place
    of an answer is allowed.
    """
    asked = [part for part in step.slices if part.verdict]
    if [part.sequence_id for part in asked] != [v.sequence_id for v in verdicts]:
        raise ProtocolError(f"the verdicts of step {step.step} do not match its slices")
    for part, verdict in zip(asked, verdicts, strict=True):
        sequence_id, window = part.sequence_id, part.window
        if verdict.error is not None:
            continue
        if not 0 <= verdict.num_accepted <= window or not (0 <= verdict.token_id < vocab_size):
            raise ProtocolError(
                f"the verdict of sequence {sequence_id} accepts {verdict.num_accepted} of "
                f"{window} candidates and adds token {verdict.token_id} "
                f"of a vocabulary of {vocab_size}"
            )
        if verdict.logprobs and len(verdict.logprobs) != verdict.num_accepted + 1:
            raise ProtocolError(
                f"the verdict of sequence {sequence_id} has {len(verdict.logprobs)} log "
                f"probabilities for {verdict.num_accepted + 1} tokens"
            )
        accepted = accepted_path(verdict)
        is_told = verdict.accepted or part.parents  # Else the path is the start of the chain.
        if is_told and (len(accepted) != verdict.num_accepted or not _is_path(part, accepted)):
            raise ProtocolError(
                f"the verdict of sequence {sequence_id} accepts the candidates "
                f"{list(accepted)}, which do not form a path of its window"
            )


def _is_path(part: Slice, accepted: tuple[int, ...]) -> bool:
    """Whether these candidates of a window are a path from its root."""
    if not part.parents:
        return accepted == tuple(range(len(accepted)))
    above = 0
    for index in accepted:
        if not 0 <= index < part.window or part.parents[index] != above:
            return False
        above = index + 1
    return True


def refused_after(part: Slice, path: tuple[int, ...]) -> tuple[int, ...]:
    """The candidates that were next after an accepted path: in a tree, the first of each fork."""
    candidates = part.token_ids[len(part.token_ids) - part.window :]
    if not part.parents:
        return candidates[len(path) :]
    node, found = path[-1] + 1 if path else 0, list[int]()
    for index, parent in enumerate(part.parents):
        if parent == node:
            found.append(candidates[index])
            node = index + 1
    return tuple(found)


def accepted_path(verdict: SequenceVerdict) -> tuple[int, ...]:
    """Indices of the accepted path. In a chain these are the first `num_accepted`."""
    if verdict.accepted or not verdict.num_accepted:
        return verdict.accepted
    return tuple(range(verdict.num_accepted))


def gives_up_bonus(sequence: Sequence, accepted: tuple[int, ...]) -> bool:
    """Whether to drop the verdict's own token, so that the run-ahead's first token gets verified.

    Rules that toss coins need this: the run-ahead was drawn as if its own first token came next, so
    that token must be verified (docs/policies.md, pearl). The decision depends on what has arrived,
    never on a token's value. If no candidate was accepted, the verdict's token is committed,
    because otherwise the step would commit nothing.
    """
    if rule_named(sequence.request.spec.rule).shares_noise or not accepted:
        return False
    return sequence.tree.run_ahead_follows(accepted)


def cut_at_end(
    sequence: Sequence, offset: int, committed: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The part of newly committed tokens that the caller gets, and why the sequence ends there.

    `offset`: output tokens before them. The reason is None if the sequence goes on.
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
