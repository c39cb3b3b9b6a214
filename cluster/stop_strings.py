"""Stop strings: found in text as it comes, at a cost per character that no text can raise.

Aho and Corasick 1975: the strings make a tree of their beginnings, and each node knows the longest
other node that is an end of it. A character moves from node to node. On average that is one move a
character; for a single one at most as many as the longest string has characters. (pyahocorasick
matches across pieces of text as well, but does not tell how deep in its tree it stands, and that is
how much text must be held back.)
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

_ROOT = 0


class StopStrings:
    """The automaton of some strings. Immutable: sequences may share it. False where there is none.

    To build one takes microseconds per character: do it off the event loop.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        """No string is empty."""
        self.strings = tuple(strings)
        self._children: list[dict[str, int]] = [{}]
        self._depth = array("I", [0])
        # Of the strings that end at a node: the length of the longest, 0: none.
        self._longest = array("I", [0])
        for string in self.strings:
            self._insert(string)
        self._fallback = array("I", bytes(self._depth.itemsize * len(self._depth)))
        self._link()

    def __bool__(self) -> bool:
        return bool(self.strings)

    def scan(self, node: int, text: str) -> tuple[int, int | None]:
        """Read `text` on from a node (the first is 0).

        Returns the node after it, and where the string begins that begins first of all that end in
        `text`: counted from the begin of `text`, so it may be negative. None: no string ends there.
        """
        children, fallback, longest = self._children, self._fallback, self._longest
        first: int | None = None
        for index, character in enumerate(text):
            while (child := children[node].get(character)) is None and node != _ROOT:
                node = fallback[node]
            if child is None:
                continue
            node = child
            if longest[node]:
                begin = index + 1 - longest[node]
                first = begin if first is None else min(first, begin)
        return node, first

    def depth(self, node: int) -> int:
        """How many of the last characters read are the begin of a string."""
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
        """Set the fallback of each node, the nodes nearest to the root first."""
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
