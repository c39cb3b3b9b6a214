"""Finds stop strings in text as it arrives, at a bounded cost per character.

The algorithm is that of Aho and Corasick (1975). The strings form a tree of their prefixes, and
each node knows the longest other node that is a suffix of it. Each character moves from node to
node: one move on average, and for one character at most as many moves as the longest string has
characters. (pyahocorasick matches across pieces of text as well, but does not tell its depth in the
tree, which is how much text must be held back.)
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

_ROOT = 0


class StopStrings:
    """The automaton of some strings. Immutable, so sequences may share it. False if it is empty.

    Building it takes microseconds per character: do it off the event loop.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        """`strings`: none of them may be empty."""
        self.strings = tuple(strings)
        self._children: list[dict[str, int]] = [{}]
        self._depth = array("I", [0])
        # Length of the longest string that ends at a node; 0: none does.
        self._longest = array("I", [0])
        for string in self.strings:
            self._insert(string)
        self._fallback = array("I", bytes(self._depth.itemsize * len(self._depth)))
        self._link()

    def __bool__(self) -> bool:
        return bool(self.strings)

    def scan(self, node: int, text: str) -> tuple[int, tuple[int, int] | None]:
        """Read `text`, starting at `node` (at first 0).

        Returns the node after it, and start and end of the earliest string among those that end in
        `text`. Both count from the start of `text`, and the start may be negative. None: no string
        ends there.
        """
        children, fallback, longest = self._children, self._fallback, self._longest
        first: tuple[int, int] | None = None
        for index, character in enumerate(text):
            while (child := children[node].get(character)) is None and node != _ROOT:
                node = fallback[node]
            if child is None:
                continue
            node = child
            if longest[node]:
                begin = index + 1 - longest[node]
                if first is None or begin < first[0]:
                    first = begin, index + 1
        return node, first

    def depth(self, node: int) -> int:
        """The number of last characters read that are the start of a string."""
        return self._depth[node]

    def _insert(self, string: str) -> None:
        node = _ROOT
        for depth, character in enumerate(string, start=1):
            child = self._children[node].get(character)
            if child is None:
                child = self._children[node][character] = len(self._children)
                self._children.append({})
                self._depth.append(depth)
                self._longest.append(0)
            node = child
        self._longest[node] = len(string)

    def _link(self) -> None:
        """Set the fallback of each node, nodes near the root first."""
        nodes = deque(self._children[_ROOT].values())
        while nodes:
            node = nodes.popleft()
            for character, child in self._children[node].items():
                nodes.append(child)
                other = self._fallback[node]
                while character not in self._children[other] and other != _ROOT:
                    other = self._fallback[other]
                target = self._children[other].get(character, _ROOT)
                self._fallback[child] = target
                self._longest[child] = max(self._longest[child], self._longest[target])
