"""Handles the events of drafters: who joins and leaves, what they propose, what they decline.

Candidates are placed in the trees of their sequences, or dropped.
"""

from __future__ import annotations

import logging

from cluster.decoding.auto.choices import Pilot
from cluster.decoding.events import (
    DraftDeclined,
    DrafterJoined,
    DrafterLost,
    DraftEvent,
    MalformedProposal,
    Proposed,
)
from cluster.decoding.sequence import Sequence
from cluster.decoding.state import DecodingState, Deferred
from cluster.decoding.structures import without_refused
from paceline.errors import ProtocolError
from workers.verification.rule import rule_named

_log = logging.getLogger(__name__)


def take_draft_event(state: DecodingState, event: DraftEvent, out: Deferred) -> None:
    """Take in what a drafter did. Instructions are appended to `out`."""
    match event:
        case Proposed():
            take_proposals(state, event, out)
        case MalformedProposal():
            state.totals.malformed_proposals += 1
            state.drafters.blame(event.drafter, state.sequences(), out.drafters)
            state.assign(out)
        case DraftDeclined():
            _decline(state, event, out)
        case DrafterJoined():
            state.drafters.join(event)
            state.auto.joined(event)
            state.assign(out)
        case DrafterLost():
            state.drafters.lose(event.drafter, state.sequences())
            state.assign(out)


def _decline(state: DecodingState, event: DraftDeclined, out: Deferred) -> None:
    sequence = state.find(event.sequence_id)
    drafters = state.drafters
    if not drafters.has_joined(event.drafter):
        return
    drafters.told(event.drafter, 0, state.sequences(), out.drafters)
    if not drafters.has_joined(event.drafter):
        state.assign(out)
    elif sequence is not None:
        drafters.decline(event.now, event.drafter, sequence, out.drafters, for_good=event.for_good)


def take_proposals(state: DecodingState, event: Proposed, out: Deferred) -> None:
    """Place the proposals of a pass. The drafter is blamed if they contradict earlier ones."""
    drafter, pass_seconds = event.drafter, event.believable_seconds
    had_joined = state.drafters.has_joined(drafter)
    has_model = state.drafters.has_model(drafter)
    state.utilization.drafted(drafter, pass_seconds)
    drafted = any(proposal.token_ids for proposal in event.proposals)
    state.drafters.heard(event.now, drafter, event.seconds_a_pass, drafted=drafted)
    pace, total, dropped = state.drafters.pace(drafter), 0, 0
    vocab_size = state.vocab_size or 0
    sequence, sequence_id, leads, may_propose = None, -1, True, False
    waiting: dict[int, Sequence] | None = None
    contradictions = 0
    catches_up = state.auto.observes and any(_is_behind(one, drafter) for one in state.running)
    continued: list[Pilot] = []
    for proposal in event.proposals:
        if proposal.sequence_id != sequence_id:  # Proposals of a sequence are adjacent.
            sequence_id = proposal.sequence_id
            sequence = state.find_running(sequence_id)
            if sequence is None:
                if waiting is None:  # Built once a message, since the line may be long.
                    waiting = {one.sequence_id: one for one in state.waiting}
                sequence = waiting.get(sequence_id)
            if sequence is None:
                continue
            if sequence.drafter == drafter:
                sequence.pace = pace
            sequence.drafted_by.add(drafter)
            if sequence.pilot is not None:
                sequence.pilot.catches_up = False
            leads = drafter not in sequence.helpers
            may_propose = vocab_size > 0 and _may_propose(drafter, sequence, leads=leads)
        if sequence is None:
            continue
        if sequence.matcher is not None and not has_model:
            proposal = without_refused(sequence, proposal)
        tree, token_ids = sequence.tree, proposal.token_ids
        # Forced tokens, at most a window, are held beside what was granted.
        most_nodes = sequence.ever_granted_nodes + (sequence.window if sequence.matcher else 0)
        repeats = tree.repeats
        try:
            taken = (
                may_propose
                and _are_ids(token_ids, vocab_size)
                and tree.attach(proposal, sequence.ever_granted_until, most_nodes, leads)
            )
        except ProtocolError as error:
            taken = False
            contradictions += 1
            _log.info("a proposal of %s is dropped: %s", drafter, error)
        if not taken:
            dropped += 1
        else:
            if proposal.last and leads:
                sequence.draft_exhausted = True
            if proposal.stopping_state:
                sequence.stopping_state = proposal.stopping_state
            if sequence.pilot is not None and tree.num_candidates:
                continued.append(sequence.pilot)
        new = len(token_ids) - (tree.repeats - repeats)
        sequence.counts.proposed += new
        total += new
    state.auto.drafted(event, continued, catches_up=catches_up)
    state.totals.dropped_proposals += dropped
    state.totals.counts.proposed += total
    state.totals.malformed_proposals += contradictions
    for _ in range(contradictions):
        state.drafters.blame(drafter, state.sequences(), out.drafters)
    if event.entries is not None:
        state.drafters.told(drafter, event.entries, state.sequences(), out.drafters)
    if had_joined and not state.drafters.has_joined(drafter):
        state.assign(out)


def _is_behind(sequence: Sequence, drafter: str) -> bool:
    """Whether the drafter reads a prompt, or what was committed in a rest, before it drafts."""
    if sequence.drafter != drafter or not sequence.granted_nodes:
        return False
    pilot = sequence.pilot
    return drafter not in sequence.drafted_by or (pilot is not None and pilot.catches_up)


def _are_ids(token_ids: tuple[int, ...], vocab_size: int) -> bool:
    if len(token_ids) == 1:
        return 0 <= token_ids[0] < vocab_size
    return not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size


def _may_propose(drafter: str, sequence: Sequence, *, leads: bool) -> bool:
    """Whether candidates of this drafter may be placed in the sequence's tree.

    Only the coupled rule takes candidates of several drafters in any order. The one-hot rule takes
    those of merged drafters.
    """
    request = sequence.request
    if rule_named(request.spec.rule).shares_noise or drafter == sequence.drafter:
        return True
    return request.merge and not leads
