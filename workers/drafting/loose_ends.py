"""Where a tree can grow: the leaves and candidates among which an allocation chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.drafting.allocation import Known, Leaf
from workers.drafting.expansions import Expansions
from workers.drafting.tree import DraftTree
from workers.verification.rule import rule_named


class LooseEnds:
    """Nodes that no pass has fed, and candidates that were drawn but not sent.

    The object describes one state of the tree under one grant, and is asked for twice per pass. It
    follows what a pass adds; after a cut or a new grant, make another one.
    """

    def __init__(self, tree: DraftTree, drawn: Expansions) -> None:
        self._tree, self._drawn, self._grant = tree, drawn, tree.grant
        self.reached = drawn.reached(tree)
        """The probability of each node, the root included, that it will be committed."""
        self.known: list[Known] = []
        """Candidates that were drawn but not sent, the likeliest first."""
        self._unfed = [node for node in range(tree.end + 1) if node not in drawn.of]
        self._num_offered = self._num_fed = 0
        # Candidates beyond the grant's `branches` were drawn for fan-out only.
        self._width = tree.grant.branches if rule_named(tree.spec.rule).shares_noise else None
        self._offer(drawn.of)

    @property
    def are_all(self) -> bool:
        """Whether it describes the present state; nodes added from elsewhere are unknown to it."""
        return (
            self._grant is self._tree.grant
            and len(self.reached) == self._tree.end + 1
            and self._num_fed == len(self._drawn.of)
        )

    @property
    def leaves(self) -> list[Leaf]:
        """Nodes that could be fed."""
        room, reached, copies = self._tree.room, self.reached, self._drawn.copies
        return [
            Leaf(node, reached[node], room(node))
            for node in self._unfed
            if node not in copies and room(node) > 0
        ]

    def fed(self, nodes: Sequence[int]) -> None:
        """Note that `nodes` were fed and their candidates drawn."""
        self._offer(nodes)
        of = self._drawn.of
        self._unfed = [node for node in self._unfed if node not in of]

    def sent(self, chosen: Sequence[tuple[int, int]]) -> None:
        """Note that `chosen`, the likeliest candidates, are the next nodes of the tree."""
        for (negative, _, _, candidate), one in zip(self.known, chosen, strict=False):
            assert candidate == one, "a likelier candidate was not sent"
            self._unfed.append(len(self.reached))
            self.reached.append(-negative)
        del self.known[: len(chosen)]

    def check_integrity(self) -> None:
        """Assert that it equals a new one made from the tree's present state."""
        if self.are_all:
            now = LooseEnds(self._tree, self._drawn)
            assert (self.reached, self.leaves) == (now.reached, now.leaves), "other leaves"
            places = [[place for _, _, _, place in one.known] for one in (self, now)]
            assert places[0] == places[1], "other candidates, or in another order"

    def _offer(self, nodes: Iterable[int]) -> None:
        """Add the candidates under nodes that were fed."""
        known, count = self.known, self._num_offered
        for node in nodes:
            self._num_fed += 1
            room = self._tree.room(node) - 1
            if room < 0:
                continue
            expansion, reached = self._drawn.of[node], self.reached[node]
            for index, chance in enumerate(expansion.chances[: self._width]):
                if expansion.nodes[index] is None:
                    known.append((-reached * chance, count, room, (node, index)))
                    count += 1
        self._num_offered = count
        known.sort()
