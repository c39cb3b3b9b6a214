"""A virtual clock. It jumps to the time of the next scheduled call."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class VirtualClock:
    """Makes scheduled calls in order of time; calls for the same time in order of scheduling.

    So a simulation takes the same course whenever it begins alike. Times are seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` at `time`, which must not have passed."""
        assert time >= self.now, "the virtual clock cannot go back"
        self._asked += 1
        heappush(self._due, (time, self._asked, action, arguments))

    def run(self) -> None:
        """Run until no call is scheduled."""
        due = self._due
        while due:
            self.now, _, action, arguments = heappop(due)
            action(*arguments)
