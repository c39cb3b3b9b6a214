"""Makes the proposals that tell a driver what was drafted."""

from __future__ import annotations

from dataclasses import replace

from workers.drafting.excerpt import excerpt_of, excerpts_of
from workers.drafting.proposal import Proposal
from workers.drafting.protocols import Draft


def proposals_of(sequence_id: int, draft: Draft, first: int) -> list[Proposal]:
    """Add what was drafted to its tree. Returns proposals for the nodes from `first` on."""
    tree = draft.tree
    tree.extend(draft.new)
    final = draft.last or tree.finished
    last = final or draft.grant_used or tree.used_up
    if last:
        tree.tell_last(until_grant=not final)
    if first == tree.end and not tree.needs_draft_probs and tree.multiplicities[first] == 1:
        base_length, base_hash = tree.base(tree.parents[first])  # one node, as in most chains
        new, state = (tree.tokens[first],), draft.stopping_state
        return [Proposal(sequence_id, base_length, base_hash, new, last, stopping_state=state)]
    grows = not (draft.last or tree.needs_draft_probs)
    if grows and max(tree.parents[first:], default=first) < first:
        return _one_by_one(sequence_id, draft, first, last=last)
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


def _one_by_one(sequence_id: int, draft: Draft, first: int, *, last: bool) -> list[Proposal]:
    """One proposal per new node under its own base, in the order drawn. No node is sent again.

    Proposals of this form are sent in columns (wire.py).
    """
    tree = draft.tree
    proposals = [
        Proposal(sequence_id, *tree.base(tree.parents[node]), (tree.tokens[node],))
        for node in range(first, tree.end + 1)
    ]
    if draft.stopping_state:
        proposals[0] = replace(proposals[0], stopping_state=draft.stopping_state)
    if last:
        proposals[-1] = replace(proposals[-1], last=True)
    return proposals
