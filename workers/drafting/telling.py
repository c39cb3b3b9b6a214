"""What a drafter tells of what it drafted."""

from __future__ import annotations

from workers.drafting.excerpt import excerpt_of, excerpts_of
from workers.drafting.proposal import Proposal
from workers.drafting.proposer import Draft


def proposals_of(sequence_id: int, draft: Draft, first: int) -> list[Proposal]:
    """Add what was drafted to its tree, and tell of the nodes from `first` on."""
    tree = draft.tree
    tree.extend(draft.new)
    final = draft.last or tree.finished
    last = final or draft.grant_used or tree.used_up
    if last:
        tree.tell_last(until_grant=not final)
    if first == tree.end and not tree.needs_draft_probs and tree.multiplicities[first] == 1:
        base_length, base_hash = tree.base(tree.parents[first])  # one node, as of most chains
        new, state = (tree.tokens[first],), draft.stopping_state
        return [Proposal(sequence_id, base_length, base_hash, new, last, stopping_state=state)]
    # Of branches in many places only what is new is told, each under its own base.
    excerpts = excerpts_of(tree, first) if tree.grant.fan_out else [excerpt_of(tree, first)]
    proposals = []
    for excerpt in excerpts:
        base_length, base_hash = tree.base(excerpt.base)
        proposals.append(
            Proposal(
                sequence_id,
                base_length,
                base_hash,
                excerpt.token_ids,
                last and excerpt is excerpts[-1],
                excerpt.parents,
                excerpt.multiplicities,
                excerpt.distributions,
                draft.stopping_state,
            )
        )
    return proposals
