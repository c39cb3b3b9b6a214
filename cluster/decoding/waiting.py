"""Sequences that have no place in a batch, in the order in which they came."""

from __future__ import annotations

from bisect import bisect
from collections import deque

from cluster.decoding.sequence import Sequence
from cluster.decoding.suspects import Suspects


class WaitingLine(deque[Sequence]):
    """One line for all target groups: whoever was first goes first, wherever there is room.

    Suspects go before all others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.suspects = Suspects()

    @property
    def first(self) -> Sequence:
        """Who is to be let in next."""
        suspect = self.suspects.first_of(self) if self.suspects else None
        return self[0] if suspect is None else suspect

    def put_back(self, sequence: Sequence) -> None:
        """One that lost its place in a batch waits again, before those who came after it."""
        self.insert(bisect(self, sequence.order, key=_order), sequence)


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
