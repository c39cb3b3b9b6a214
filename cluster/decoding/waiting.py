"""Sequences without a place in a batch, in the order of arrival."""

from __future__ import annotations

from bisect import bisect
from collections import deque

from cluster.decoding.sequence import Sequence
from cluster.decoding.suspects import Suspects


class WaitingLine(deque[Sequence]):
    """The waiting line of all target groups. The first goes first, wherever there is room.

    Suspects go before all others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.suspects = Suspects()

    @property
    def first(self) -> Sequence:
        """The sequence to let in next."""
        suspect = self.suspects.first_of(self) if self.suspects else None
        return self[0] if suspect is None else suspect

    def put_back(self, sequence: Sequence) -> None:
        """Insert a sequence that lost its place, before those that arrived after it."""
        self.insert(bisect(self, sequence.order, key=_order), sequence)


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
