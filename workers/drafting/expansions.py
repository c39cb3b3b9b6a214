"""What was drawn in one sequence's tree, node by node, and which of it was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.drafting.acceptance_map import TokenSignal
from workers.drafting.nodes import ROOT, Kept
from workers.drafting.tree import DraftTree
from workers.verification.draft_probs import SparseProbs


@dataclass(slots=True)
class Children:
    """Candidates in the order drawn, and what they were drawn from where the rule asks for it.

    `gaps` say how sure the drafter is of each (chances.py). `paths`: k-SEQ's, through each.
    """

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    distribution: SparseProbs | None = None
    paths: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class Expansion:
    """What the model gave for a node: its candidates, in the order in which they are tried.

    `chances[i]`: that candidate i is accepted where the node is. `nodes[i]`: its number once it was
    sent. `signals`: what a stopping rule looks at, one a candidate, or none.
    """

    children: Children
    chances: list[float]
    nodes: list[int | None]
    signals: Sequence[TokenSignal] = ()


@dataclass(slots=True)
class Expansions:
    """The expansions of a tree's nodes, by node number, and what follows of the nodes sent.

    `chance`: of each node but the root, that it is accepted where its parent is. `paths`: of
    k-SEQ's nodes, the numbers of the paths that go through them. `copies`: nodes that have an older
    sibling of the same token; refused once, an equal token is refused for sure, so nothing below
    them can matter.
    """

    of: dict[int, Expansion] = field(default_factory=dict)
    chance: dict[int, float] = field(default_factory=dict)
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)

    def sent(self, parent: int, index: int, number: int) -> None:
        """Candidate `index` under `parent` is the node `number` now."""
        expansion = self.of[parent]
        token_ids = expansion.children.token_ids
        expansion.nodes[index] = number
        self.chance[number] = expansion.chances[index]
        if expansion.children.paths:
            self.paths[number] = expansion.children.paths[index]
        if token_ids[index] in token_ids[:index]:
            self.copies.add(number)

    def reached(self, tree: DraftTree) -> list[float]:
        """The chance of each node, the root included, that it will be committed."""
        reached = [1.0] * (tree.end + 1)
        for node in range(1, tree.end + 1):
            reached[node] = reached[tree.parents[node]] * self.chance[node]
        return reached

    def firsts_below(self, node: int) -> list[int]:
        """The first candidate that was sent under this node, the first under that, and so on."""
        below: list[int] = []
        while (expansion := self.of.get(node)) is not None:
            first = next((number for number in expansion.nodes if number is not None), None)
            if first is None:
                break
            below.append(first)
            node = first
        return below

    def cut(self, kept: Kept) -> None:
        """The tree was cut: forget what is gone, renumber the rest."""
        if not kept.agreed:
            for held in (self.of, self.chance, self.paths, self.copies):
                held.clear()
            return
        # Of a tree with branches few nodes stay: what is kept is looked up, not what is gone.
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
        """Assert that what is kept is about nodes of the tree."""
        for node, expansion in self.of.items():
            assert node <= tree.end
            sent = [number for number in expansion.nodes if number is not None]
            assert sorted(sent) == list(tree.children(node)), "an expansion and its children differ"
        assert self.chance.keys() == set(range(1, tree.end + 1))
