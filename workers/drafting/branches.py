"""Merges guesses of how a sequence goes on, made without a draw, into one tree within a grant."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from workers.drafting.nodes import ROOT, NewNodes
from workers.drafting.tree import DraftTree

_NEXT_BRANCH = 0.5
"""Assumed probability of a guess, as a multiple of that of the guess before it."""
_NEXT_TOKEN = 0.8
"""Assumed probability that a guess which was right up to one token is right at the next one."""


def merge_branches(
    guesses: Iterable[Sequence[int]], *, branches: int, max_nodes: int
) -> tuple[list[int], list[int]]:
    """A tree of the first `branches` different guesses. `guesses` come in order, the likeliest
    first.

    Returns token ids and parents as on the wire, sorted by assumed worth. At most `max_nodes` nodes
    are kept, those worth most. A guess that is a prefix of another one is dropped and does not
    count.
    """
    chosen: list[Sequence[int]] = []
    for guess in guesses:
        if len(chosen) == branches:
            break
        if not any(list(guess) == list(other[: len(guess)]) for other in chosen):
            chosen.append(guess)
    token_ids: list[int] = []
    parents: list[int] = []
    child_of: dict[tuple[int, int], int] = {}
    # The next token of each guess: (minus its worth, rank of the guess, depth, parent).
    edge = [(-(_NEXT_BRANCH**rank), rank, 0, ROOT) for rank in range(len(chosen))]
    while edge and len(token_ids) < max_nodes:
        worth, rank, depth, above = heapq.heappop(edge)
        token_id = chosen[rank][depth]
        node = child_of.get((above, token_id))
        if node is None:
            token_ids.append(token_id)
            parents.append(above)
            node = child_of[above, token_id] = len(token_ids)
        if depth + 1 < len(chosen[rank]):
            heapq.heappush(edge, (worth * _NEXT_TOKEN, rank, depth + 1, node))
    return token_ids, parents


def unknown_part(tree: DraftTree, token_ids: Sequence[int], parents: Sequence[int]) -> NewNodes:
    """The part of a proposed tree (parents as on the wire) that `tree` does not hold yet.

    Nodes beyond the grant or below an end are left out with all their descendants. For drafters
    that draft without a draw, and propose a whole tree every time.
    """
    number_of = {ROOT: ROOT}
    new_tokens: list[int] = []
    new_parents: list[int] = []
    room = {ROOT: tree.room(ROOT)}
    for index, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
        under = number_of.get(parent)
        if under is None:
            continue
        known = tree.child_with(under, token_id) if under <= tree.end else None
        if known is None:
            if room[under] == 0 or len(new_tokens) == tree.nodes_left:
                continue
            new_tokens.append(token_id)
            new_parents.append(under)
            known = tree.end + len(new_tokens)
            ended = token_id in tree.spec.end_token_ids
            room[known] = 0 if ended else room[under] - 1
        else:
            room[known] = tree.room(known)
        number_of[index + 1] = known
    return NewNodes(new_tokens, new_parents)
