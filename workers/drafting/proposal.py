"""Turns a pass's drafts into proposals, the form in which candidates reach the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.drafting.kind import Draft
from workers.drafting.tree import DraftTree
from workers.verification.candidates import SparseProbs


@dataclass(slots=True)
class Proposal:
    """Candidates after the first `base_length` tokens: a chain, or a tree if it has `parents`.

    The fields are those of drafting.proto, Proposal. The driver turns a message that keeps that
    contract into a Proposal, and any other into a MalformedProposal.
    """

    sequence_id: int
    base_length: int
    base_hash: int
    token_ids: tuple[int, ...]
    last: bool = False
    parents: tuple[int, ...] = ()
    multiplicities: tuple[int, ...] = ()
    distributions: Mapping[int, SparseProbs] = field(default_factory=dict)
    stopping_state: Mapping[str, float] = field(default_factory=dict)


def _excerpt(sequence_id: int, tree: DraftTree, first_new: int) -> Proposal:
    """The nodes from `first_new` on, under the deepest node from which all of them descend.

    Older nodes between that node and the new ones are sent again. Under rules that need draft
    probabilities their siblings are sent too, since the children of a node can only be tested
    together. Without new nodes it is empty, at the end of a chain or the root of a tree.
    """
    if first_new > tree.end:
        return Proposal(sequence_id, *tree.base(tree.end if tree.is_chain else 0), ())
    attached_to = {
        tree.parents[node]
        for node in range(first_new, tree.end + 1)
        if tree.parents[node] < first_new
    }
    base, between = _common_ancestor(tree, attached_to)
    shown = set(range(first_new, tree.end + 1)) | between
    if tree.needs_draft_probs:
        shown.update(child for node in (base, *between) for child in tree.children(node))
    nodes = sorted(shown)
    number = {base: 0} | {node: index for index, node in enumerate(nodes, start=1)}
    parents = tuple(number[tree.parents[node]] for node in nodes)
    inner = set(parents)
    multiplicities = tuple(tree.multiplicities[node] for node in nodes)
    return Proposal(
        sequence_id,
        *tree.base(base),
        tuple(tree.tokens[node] for node in nodes),
        parents=() if parents == tuple(range(len(nodes))) else parents,
        multiplicities=multiplicities if max(multiplicities) > 1 else (),
        distributions={
            number[node]: tree.distributions[node]
            for node in (base, *nodes)
            if number[node] in inner and node in tree.distributions
        },
    )


def _excerpts(sequence_id: int, tree: DraftTree, first_new: int) -> list[Proposal]:
    """The new nodes without older ones: a proposal per older node that got new children.

    For rules without draft probabilities.
    """
    if first_new > tree.end:
        return [_excerpt(sequence_id, tree, first_new)]
    # Maps each new node to the older node above it and to its number in that node's proposal.
    above: dict[int, tuple[int, int]] = {}
    found: dict[int, tuple[list[int], list[int]]] = {}
    for node in range(first_new, tree.end + 1):
        parent = tree.parents[node]
        base, number = above.get(parent, (parent, 0))
        tokens, parents = found.setdefault(base, ([], []))
        tokens.append(tree.tokens[node])
        parents.append(number)
        above[node] = (base, len(tokens))
    return [
        Proposal(
            sequence_id,
            *tree.base(base),
            tuple(tokens),
            parents=() if parents == list(range(len(parents))) else tuple(parents),
        )
        for base, (tokens, parents) in found.items()
    ]


def _common_ancestor(tree: DraftTree, nodes: set[int]) -> tuple[int, set[int]]:
    """The deepest node that is above all of `nodes` or one of them, and the nodes in between.

    The second value includes those of `nodes` that are below the first value.
    """
    # Of two different nodes, the one with the larger number is not an ancestor of the other.
    edge = set(nodes)
    between: set[int] = set()
    while len(edge) > 1:
        lowest = max(edge)
        edge.remove(lowest)
        between.add(lowest)
        edge.add(tree.parents[lowest])
    (base,) = edge
    return base, between


def proposals_of(sequence_id: int, draft: Draft, first: int) -> list[Proposal]:
    """Proposals for the nodes from `first` on of a draft's tree, which has the draft's nodes."""
    tree = draft.tree
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
    if tree.grant.fan_out:
        proposals = _excerpts(sequence_id, tree, first)
    else:
        proposals = [_excerpt(sequence_id, tree, first)]
    for one in proposals:
        one.stopping_state = draft.stopping_state
    proposals[-1].last = last
    return proposals


def _one_by_one(sequence_id: int, draft: Draft, first: int, *, last: bool) -> list[Proposal]:
    """One proposal per new node, with its parent as base, in the order drawn.

    Proposals of this form are sent in columns (wire.py).
    """
    tree = draft.tree
    proposals = [
        Proposal(sequence_id, *tree.base(tree.parents[node]), (tree.tokens[node],))
        for node in range(first, tree.end + 1)
    ]
    proposals[0].stopping_state = draft.stopping_state
    proposals[-1].last = last
    return proposals
