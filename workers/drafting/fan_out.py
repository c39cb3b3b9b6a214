"""Fan-out: which outcomes other than the likeliest are drafted for, while a verdict is awaited.

The drafter's first candidates make a chain. An outcome that leaves it at some position, with one
of the drafter's next best candidates there, is drafted for as a branch: that candidate, and a chain
of its own that grows by a token in each pass, as all the others do. (After SSD, Kumar et al. 2026,
whose drafter answers once it has the outcome; here branches are sent as they grow.)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from paceline.value import value_class
from workers.drafting.tree import DraftTree

RANKS = 3
"""Of a position's candidates beside the first, at most so many are drafted for."""

_STEEPEST = 4.0


@value_class(frozen=True, slots=True)
class Fork:
    """A position at which an outcome may leave what is drafted.

    `node`: the node after which it lies; None: one that the chain has yet to reach. `weight`: the
    chance that the outcome leaves there.
    """

    node: int | None
    weight: float


def spread_over(forks: Iterable[Fork], budget: int, exponent: float) -> dict[int, int]:
    """How many branches each node should have, of `budget` in all.

    F ∝ weight^(1/(1+r)) with r = `exponent`, that of the hit curve: the chance that the k-th best
    candidate is it falls as k^-(1+r). In whole numbers that is to give out branches one by one,
    each to where it is likeliest to be hit. Forks that are not there yet get theirs too, so that
    they find some left. Of a smaller budget each node has as much as it is given first.
    """
    heap = [(-fork.weight, index, 0, fork) for index, fork in enumerate(forks)]
    heapq.heapify(heap)
    later = [(count + 1) ** -(1 + exponent) for count in range(RANKS)]
    counts: dict[int, int] = {}
    for _ in range(budget):
        if not heap:
            break
        _, index, count, fork = heap[0]
        count += 1
        if fork.node is not None:
            counts[fork.node] = count
        if count < RANKS:
            heapq.heapreplace(heap, (-fork.weight * later[count], index, count, fork))
        else:
            heapq.heappop(heap)
    return counts


class Expanded(Protocol):
    """A node's candidates: the chance of each, and its node number once it was sent."""

    chances: list[float]
    nodes: list[int | None]


def candidates_to_send(
    tree: DraftTree,
    expansions: Mapping[int, Expanded],
    reached: Sequence[float],
    *,
    mean: float,
    exponent: float,
) -> list[tuple[int, int]]:
    """Candidates (node, index) to send now: what continues chains, then branches to begin.

    `reached`: the chance of each node that it will be committed. `mean`: that of a first candidate
    of which nothing is known.
    """
    fan_out, shares = tree.grant.fan_out, max(1, tree.grant.shares)
    open_nodes = tree.with_room(expansions)
    forks = [Fork(node, reached[node] * (1 - expansions[node].chances[0])) for node in open_nodes]
    end = tree.chain_end()
    forks += [
        Fork(None, reached[end] * mean**ahead * (1 - mean)) for ahead in range(tree.room(end))
    ]
    counts = spread_over(forks, fan_out, exponent)
    likelier = counts if shares == 1 else spread_over(forks, -(-fan_out // 2), exponent)
    firsts = [(node, 0) for node in open_nodes if expansions[node].nodes[0] is None]
    others = [
        (node, index)
        for node, count in counts.items()
        for index in range(1, min(1 + count, len(expansions[node].nodes)))
        if expansions[node].nodes[index] is None
        and _is_mine(tree, node, index, likelier.get(node, 0))
    ]
    # Every node is the first candidate under another one, or begins a branch.
    begun = tree.num_nodes - sum(one.nodes[0] is not None for one in expansions.values())
    for places in (firsts, others):
        places.sort(key=lambda place: -reached[place[0]])
    return (firsts + others[: max(0, fan_out - begun)])[: tree.nodes_left]


def _is_mine(tree: DraftTree, node: int, index: int, num_likelier: int) -> bool:
    """Whether a branch is of this drafter's share (drafting.proto, Grant).

    `num_likelier`: of the node's branches so many are in the likelier half of all.
    """
    grant = tree.grant
    if grant.share == 0:
        return index <= num_likelier
    length, _ = tree.base(node)
    return index > num_likelier and (length + index) % (grant.shares - 1) == grant.share - 1


class HitCurve:
    """How the chance to be hit falls with a candidate's rank, learned from outcomes.

    It begins at r = 1.
    """

    def __init__(self) -> None:
        self._second, self._third = 8.0, 2.0

    def observe(self, rank: int) -> None:
        """An outcome was the candidate of this rank; the chain's own has rank 0."""
        if rank == 1:
            self._second, self._third = 1 + _FADING * self._second, _FADING * self._third
        elif rank == 2:
            self._second, self._third = _FADING * self._second, 1 + _FADING * self._third

    @property
    def exponent(self) -> float:
        """r, where rank k is hit as k^-(1+r)."""
        steepness = math.log2(max(self._second, 1e-9) / max(self._third, 1e-9))
        return min(max(steepness - 1, 0.0), _STEEPEST)


_FADING = 0.99
"""What was seen is weighed by this with each new hit."""
