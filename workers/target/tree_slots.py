"""Which candidate of a tree is in which KV position of a sequence, until one path is chosen.

A tree's candidates are in consecutive positions in the order of their numbers, and each is rotated
for the position that its depth gives it. Moves bring the accepted path to its own positions. What
then counts as committed must be that path: otherwise the sequence would continue over KV of other
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import ProtocolError


class TreeSlots:
    """Positions `first` to `first` + len(parents) - 1 hold the candidates 0, 1, ... of a tree.

    `parents` as in target.proto: 0 for a child of the token at `first` - 1, i + 1 for one of
    candidate i.
    """

    def __init__(self, first: int, parents: Sequence[int]) -> None:
        self.first = first
        self._parents = parents
        self._candidates = list(range(len(parents)))

    def move(self, source: int, target: int) -> None:
        """Note a copy from one position to another. Raises ProtocolError outside the tree."""
        last = self.first + len(self._candidates) - 1
        for position in (source, target):
            if not self.first <= position <= last:
                raise ProtocolError(
                    f"expected positions {self.first} to {last}, which hold the candidates of the "
                    f"last slice, got {source} to {target}"
                )
        self._candidates[target - self.first] = self._candidates[source - self.first]

    def check_path(self, end: int) -> None:
        """Raise ProtocolError unless the positions below `end` hold a path from the root on."""
        above = 0
        for offset, candidate in enumerate(self._candidates[: max(0, end - self.first)]):
            if self._parents[candidate] != above:
                raise ProtocolError(
                    f"expected a child of {_name(above)} at position {self.first + offset}, below "
                    f"start, got {_name(candidate + 1)}: move the accepted path to its own "
                    "positions first"
                )
            above = candidate + 1


def _name(node: int) -> str:
    return f"candidate {node - 1}" if node else "the last committed token"
