"""A clock that moves only when something is due."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class VirtualClock:
    """Calls what is due, in the order of time; what is due together, in the order of asking.

    So a simulation takes the same course whenever it begins alike. Times are seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` at `time`, which must not be over."""
        assert time >= self.now, "the virtual clock cannot go back"
        self._asked += 1
        heappush(self._due, (time, self._asked, action, arguments))

    def run(self) -> None:
        """Go on until nothing is due any more."""
        due = self._due
        while due:
            self.now, _, action, arguments = heappop(due)
            action(*arguments)
