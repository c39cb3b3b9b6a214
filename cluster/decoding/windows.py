"""The candidates of one sequence, and the choice of those that a step verifies."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.limits import MAX_BRANCHES
from workers.verification.candidates import SparseProbs


@dataclass(slots=True, eq=False)
class Node:
    """A candidate, or the last committed token, which is the root.

    `length`: tokens up to this one, itself included; `prefix_hash`: their hash. `distribution`:
    what its children were drawn from, if their rule needs it. `leads`: the sequence's first drafter
    drew it, not a helper; such children come first.
    """

    token_id: int
    length: int
    prefix_hash: int
    parent: Node | None = None
    multiplicity: int = 1
    leads: bool = True
    distribution: SparseProbs | None = None
    children: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Window:
    """The candidates of a slice, as in target.proto. Empty `parents`: a chain."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    multiplicities: tuple[int, ...]
    distributions: Mapping[int, SparseProbs]


NO_CANDIDATES = Window((), (), (), {})

RANK_CHANCES = (0.8, *(0.1 * 0.5**rank for rank in range(MAX_BRANCHES)))
"""Rough chances of a node's children by rank. They decide which nodes of a tree are verified."""

MAX_MERGED = 3
"""Most drafters whose candidates share a tree."""
MERGED_CHANCES = (0.7, *(0.25 * 0.5**rank for rank in range(MAX_BRANCHES + MAX_MERGED)))
"""The same if another drafter's candidate may come second."""


def likeliest(root: Node, limit: int, *, width: int, rank_chances: Sequence[float]) -> list[Node]:
    """The `limit` likeliest candidates, each after its parent, at most `width` children of a node.

    `rank_chances`: rough chances of a node's children by rank.
    """
    chosen: list[Node] = []
    if width == 1:
        node = root
        while len(chosen) < limit and node.children:
            node = node.children[0]
            chosen.append(node)
        return chosen
    heap: list[tuple[float, int, Node]] = []
    node, chance, pushed = root, 1.0, 0
    while len(chosen) < limit:
        for rank, child in enumerate(node.children[:width]):
            heapq.heappush(heap, (-chance * rank_chances[rank], pushed, child))
            pushed += 1
        if not heap:
            break
        negative, _, node = heapq.heappop(heap)
        chance = -negative
        chosen.append(node)
    return chosen


def num_likeliest(root: Node, limit: int, *, width: int) -> int:
    """How many candidates `likeliest` would choose."""
    if width == 1:
        return lead_length(root, limit)
    found = 0
    above = [root]
    while above and found < limit:
        children = above.pop().children
        if children:
            children = children[:width]
            found += len(children)
            above += children
    return min(found, limit)


def lead_length(root: Node, limit: int) -> int:
    """Length of the chain of first children below `root`, up to `limit`."""
    length = 0
    while length < limit and root.children:
        root, length = root.children[0], length + 1
    return length


def window_of(
    root: Node, nodes: Sequence[Node], *, with_multiplicities: bool, in_line: bool = False
) -> Window:
    """These candidates, each after its parent, in the form that a step takes.

    `in_line`: each is known to be the child of the one before.
    """
    if not nodes:
        return NO_CANDIDATES
    parents: Sequence[int] = range(len(nodes))
    if not in_line:
        number = {root: 0, **{node: index for index, node in enumerate(nodes, start=1)}}
        found = [number[node.parent] for node in nodes if node.parent is not None]
        if found != list(parents):
            parents = found
    above = (root, *nodes)
    return Window(
        token_ids=tuple([node.token_id for node in nodes]),
        parents=() if isinstance(parents, range) else tuple(parents),
        multiplicities=tuple([node.multiplicity for node in nodes]) if with_multiplicities else (),
        distributions={
            parent: distribution
            for parent in dict.fromkeys(parents)
            if (distribution := above[parent].distribution) is not None
        },
    )


def put_child(parent: Node, child: Node, *, leads: bool) -> None:
    """Add a last child; a leading one goes after the last child that leads."""
    child.leads = leads
    siblings = parent.children
    if not leads or not siblings or siblings[-1].leads:
        siblings.append(child)
    else:
        siblings.insert(sum(one.leads for one in siblings), child)
