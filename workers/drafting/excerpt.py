"""The part of a tree that a proposal must show, so that the driver can place new nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workers.drafting.tree import DraftTree
from workers.verification.candidates import SparseProbs


@dataclass(slots=True)
class Excerpt:
    """A subtree under the node `base`, numbered as in drafting.proto. Empty `parents`: a chain."""

    base: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    multiplicities: tuple[int, ...]
    distributions: Mapping[int, SparseProbs]


def excerpt_of(tree: DraftTree, first_new: int) -> Excerpt:
    """The nodes from `first_new` on, under the deepest node from which all of them descend.

    Older nodes in between are sent again. Under rules that need draft probabilities their siblings
    are sent too, since the children of a node can only be tested together. Without new nodes the
    excerpt is empty, at the end of a chain or at the root of a tree.
    """
    if first_new > tree.end:
        return Excerpt(tree.end if tree.is_chain else 0, (), (), (), {})
    needs_probs = tree.needs_draft_probs
    attached_to = {
        tree.parents[node]
        for node in range(first_new, tree.end + 1)
        if tree.parents[node] < first_new
    }
    base, between = _common_ancestor(tree, attached_to)
    shown = set(range(first_new, tree.end + 1)) | between
    if needs_probs:
        shown.update(child for node in (base, *between) for child in tree.children(node))
    nodes = sorted(shown)
    number = {base: 0} | {node: index for index, node in enumerate(nodes, start=1)}
    parents = tuple(number[tree.parents[node]] for node in nodes)
    inner = set(parents)
    multiplicities = tuple(tree.multiplicities[node] for node in nodes)
    return Excerpt(
        base,
        tuple(tree.tokens[node] for node in nodes),
        () if parents == tuple(range(len(nodes))) else parents,
        multiplicities if max(multiplicities) > 1 else (),
        {
            number[node]: tree.distributions[node]
            for node in (base, *nodes)
            if number[node] in inner and node in tree.distributions
        },
    )


def excerpts_of(tree: DraftTree, first_new: int) -> list[Excerpt]:
    """The new nodes as excerpts that repeat no older node: one per older node that got children.

    For rules without draft probabilities.
    """
    if first_new > tree.end:
        return [excerpt_of(tree, first_new)]
    # Maps each new node to the older node above it and to its number in that node's excerpt.
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
        Excerpt(
            base,
            tuple(tokens),
            () if parents == list(range(len(parents))) else tuple(parents),
            (),
            {},
        )
        for base, (tokens, parents) in found.items()
    ]


def _common_ancestor(tree: DraftTree, nodes: set[int]) -> tuple[int, set[int]]:
    """The deepest node that is above all of `nodes` or one of them, and the nodes in between.

    The second value includes those of `nodes` that lie below the first.
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
