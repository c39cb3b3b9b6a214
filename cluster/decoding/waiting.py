"""Sequences that have no place in a batch, in the order in which they came."""

from __future__ import annotations

from bisect import bisect
from collections import deque

from cluster.decoding.sequence import Sequence


class WaitingLine(deque[Sequence]):
    """One line for all target groups: whoever was first goes first, wherever there is room."""

    def put_back(self, sequence: Sequence) -> None:
        """One that lost its place in a batch waits again, before those who came after it."""
        self.insert(bisect(self, sequence.order, key=_order), sequence)


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
