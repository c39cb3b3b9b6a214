"""A virtual clock, which jumps to the time of the next scheduled call, and links that follow it."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from workers.emulated.latency_profiles import LinkProfile


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
        due = self._due
        while due:
            self.now, _, action, arguments = heappop(due)
            action(*arguments)


class SimulatedLink:
    """One direction of a stream. Messages arrive in order, each after its delay.

    `hop_seconds`: time of a message between two processes on the same host, added to the network's.
    """

    def __init__(self, clock: VirtualClock, profile: LinkProfile, *, hop_seconds: float) -> None:
        self._clock = clock
        self._profile = profile
        self._delay = profile.one_way_seconds(0) + hop_seconds
        self.is_bounded = profile.mbit_per_second > 0
        """Whether the size of messages matters."""
        self._free_at = 0.0

    def send(
        self, time: float, num_bytes: int, deliver: Callable[..., None], *arguments: Any
    ) -> None:
        """Call `deliver` when a message arrives that leaves at `time`, now or later."""
        if self.is_bounded:
            sending = self._profile.one_way_seconds(num_bytes) - self._profile.one_way_seconds(0)
            time = self._free_at = max(time, self._free_at) + sending
        self._clock.at(time + self._delay, deliver, *arguments)
