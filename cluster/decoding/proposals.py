"""What a drafter's pass does: candidates find their places, or are dropped."""

from __future__ import annotations

from cluster.decoding.events import Proposal, Proposed
from cluster.decoding.sequence import Sequence
from cluster.decoding.state import DecodingState
from paceline.rules import Rule


def take_proposals(state: DecodingState, event: Proposed) -> None:
    """A pass of a drafter, for all its sequences."""
    drafter, pass_seconds = event.drafter, event.believable_seconds
    state.utilisation.drafted(drafter, pass_seconds)
    drafted = any(proposal.token_ids for proposal in event.proposals)
    state.drafters.heard(event.now, drafter, pass_seconds, drafted=drafted)
    state.auto.drafted(event)
    vocab_size, pace = state.vocab_size, state.drafters.pace(drafter)
    total = 0
    for proposal in event.proposals:
        sequence = state.find(proposal.sequence_id)
        if sequence is None:
            continue
        if sequence.drafter == drafter:
            sequence.pace = pace
        tree = sequence.tree
        repeats = tree.repeats
        if not _attach(drafter, sequence, proposal, vocab_size):
            state.totals.dropped_proposals += 1
        elif sequence.pilot is not None and tree.num_candidates:
            state.auto.beliefs.attached(sequence.pilot, event)
        new = len(proposal.token_ids) - (tree.repeats - repeats)
        sequence.drafted_by.add(drafter)
        sequence.counts.proposed += new
        total += new
    state.totals.counts.proposed += total


def _attach(drafter: str, sequence: Sequence, proposal: Proposal, vocab_size: int | None) -> bool:
    token_ids, request = proposal.token_ids, sequence.request
    if vocab_size is None:
        return False
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return False
    leads = drafter not in sequence.helpers
    may_be_any = request.spec.rule is Rule.COUPLED or (request.merge and not leads)
    if not (may_be_any or drafter == sequence.drafter):
        # Only the coupled rule may mix candidates of several drafters as they come, and the
        # one-hot rule those of drafters that are merged.
        return False
    if not sequence.tree.attach(
        proposal,
        until_position=sequence.ever_granted_until,
        max_nodes=sequence.ever_granted_nodes,
        leads=leads,
    ):
        return False
    if proposal.last and leads:
        sequence.draft_exhausted = True
    if proposal.stopping_state:
        sequence.stopping_state = proposal.stopping_state
    return True
