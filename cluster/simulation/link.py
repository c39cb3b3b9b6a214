"""A simulated way from one process to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.simulation.clock import VirtualClock
from workers.emulated.profiles import LinkProfile


class SimulatedLink:
    """One direction of a stream: messages arrive in order, each after what it takes.

    `hop_seconds`: what a message costs between two processes even where the network is no way.
    """

    def __init__(self, clock: VirtualClock, profile: LinkProfile, *, hop_seconds: float) -> None:
        self._clock = clock
        self._profile = profile
        self._delay = profile.one_way_seconds(0) + hop_seconds
        self.is_bounded = profile.mbit_per_second > 0
        """Whether it matters how large messages are."""
        self._free_at = 0.0

    def send(
        self, time: float, num_bytes: int, deliver: Callable[..., None], *arguments: Any
    ) -> None:
        """Have `deliver` called with a message that leaves at `time`, now or later."""
        if self.is_bounded:
            sending = self._profile.one_way_seconds(num_bytes) - self._profile.one_way_seconds(0)
            time = self._free_at = max(time, self._free_at) + sending
        self._clock.at(time + self._delay, deliver, *arguments)
