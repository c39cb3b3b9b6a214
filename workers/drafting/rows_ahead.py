"""The rows that a pass of a parallel drafter gives after a node, until a token is drawn from each.

The first row says what follows the node, and each further row what follows the token before it,
whatever that token is. So a row waits until its node is in the tree.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from workers.drafting.tree import DraftTree


class _Rows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


R = TypeVar("R", bound=_Rows)


class RowsAhead(Generic[R]):
    """The rows of one tree's nodes. A tensor [rows, V], or any other sequence."""

    def __init__(self) -> None:
        self._of: dict[int, R] = {}
        # By node, the rows below it: its first child gets them once it is in the tree.
        self._below: dict[int, R] = {}

    @property
    def is_empty(self) -> bool:
        return not (self._of or self._below)

    def give(self, node: int, rows: R) -> None:
        """Note the rows that a pass gave a node."""
        self._of[node] = rows

    def take(self, node: int) -> Any:
        """The row that says what follows a node. The others wait for its first child."""
        rows = self._of.pop(node)
        if len(rows) > 1:
            self._below[node] = rows[1:]
        return rows[0]

    def known(self, tree: DraftTree, nodes: list[int]) -> list[int]:
        for node in [one for one in self._below if tree.children(one)]:
            self._of[tree.children(node)[0]] = self._below.pop(node)
        return [node for node in nodes if node in self._of]

    def clear(self) -> None:
        """Forget all: now that more of the text is known, a pass gives better rows."""
        self._of.clear()
        self._below.clear()

    def check_integrity(self, tree: DraftTree) -> None:
        assert all(node <= tree.end for node in (*self._of, *self._below))
