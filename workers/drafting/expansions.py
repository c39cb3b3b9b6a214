"""The candidates drawn under each node of one sequence's tree, and which of them were sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.drafting.draft_stopping import TokenSignal
from workers.drafting.tree import ROOT, DraftTree, Kept
from workers.verification.candidates import SparseProbs


@dataclass(slots=True)
class Children:
    """Candidates in the order drawn, and the distribution that they were drawn from, if needed.

    `gaps` say how sure the drafter is of each candidate (chances.py). `paths`: for each candidate,
    the numbers of the k-SEQ paths through it.
    """

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    distribution: SparseProbs | None = None
    paths: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class Expansion:
    """The candidates that were drawn under a node, in the order in which they are tested.

    `chances[i]`: the probability that candidate i is accepted if the node is. `nodes[i]`: the node
    number of candidate i once it was sent, else None. `signals`: the inputs of a stopping rule, one
    per candidate, or empty.
    """

    children: Children
    chances: list[float]
    nodes: list[int | None]
    signals: Sequence[TokenSignal] = ()


@dataclass(slots=True)
class Expansions:
    """The expansions of a tree's nodes by node number, and values of the nodes that were sent.

    `chance`: for each node but the root, the probability that it is accepted if its parent is.
    `paths`: for k-SEQ, the numbers of the paths through a node. `copies`: nodes that have an older
    sibling with the same token. If the older sibling is refused, so is its copy, so nothing below a
    copy matters.
    """

    of: dict[int, Expansion] = field(default_factory=dict)
    chance: dict[int, float] = field(default_factory=dict)
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)

    def sent(self, parent: int, index: int, number: int) -> None:
        """Note that candidate `index` under `parent` was sent as node `number`."""
        expansion = self.of[parent]
        token_ids = expansion.children.token_ids
        expansion.nodes[index] = number
        self.chance[number] = expansion.chances[index]
        if expansion.children.paths:
            self.paths[number] = expansion.children.paths[index]
        if token_ids[index] in token_ids[:index]:
            self.copies.add(number)

    def under(self, nodes: Sequence[int]) -> list[tuple[int, int]]:
        return [
            (node, index)
            for node in nodes
            for index in range(len(self.of[node].children.token_ids))
        ]

    def reached(self, tree: DraftTree) -> list[float]:
        """The probability of each node, the root included, that it will be committed."""
        reached = [1.0] * (tree.end + 1)
        for node in range(1, tree.end + 1):
            reached[node] = reached[tree.parents[node]] * self.chance[node]
        return reached

    def firsts_below(self, node: int) -> list[int]:
        """The path below `node` that always takes the first candidate that was sent."""
        below: list[int] = []
        while (expansion := self.of.get(node)) is not None:
            first = next((number for number in expansion.nodes if number is not None), None)
            if first is None:
                break
            below.append(first)
            node = first
        return below

    def cut(self, kept: Kept) -> None:
        """Follow a cut of the tree: forget the nodes that are gone, and renumber the others."""
        if not kept.agreed:
            for held in (self.of, self.chance, self.paths, self.copies):
                held.clear()
            return
        # Few nodes of a tree with branches stay, so iterate over these.
        nodes = {old: number for number, old in enumerate(kept.nodes, start=1)}
        number_of = {kept.path[-1]: ROOT, **nodes}
        of, chance = self.of, self.chance
        self.of = {number: of[old] for old, number in number_of.items() if old in of}
        for expansion in self.of.values():
            expansion.nodes = [
                number_of[old] if old is not None else None for old in expansion.nodes
            ]
        self.chance = {number: chance[old] for old, number in nodes.items()}
        if self.paths:
            self.paths = {nodes[old]: value for old, value in self.paths.items() if old in nodes}
        if self.copies:
            self.copies = {nodes[old] for old in self.copies if old in nodes}

    def check_integrity(self, tree: DraftTree) -> None:
        for node, expansion in self.of.items():
            assert node <= tree.end
            sent = [number for number in expansion.nodes if number is not None]
            assert sorted(sent) == list(tree.children(node)), "an expansion and its children differ"
        assert self.chance.keys() == set(range(1, tree.end + 1))
