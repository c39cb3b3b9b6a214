"""A simulated link from one process to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.simulation.clock import VirtualClock
from workers.emulated.profiles import LinkProfile


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
