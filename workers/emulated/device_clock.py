"""Waiting until an emulated device is done, to some hundredths of a millisecond.

asyncio wakes up to a millisecond late. A thread's sleep with the finest timer slack, and a short
spin at its end, do not; and what is late all the same is made good by the next pass.
"""

from __future__ import annotations

import ctypes
import time

from workers.worker_clock import WorkerClock

MOST_MADE_GOOD = 0.005
"""Real seconds of lateness that the next pass makes good. What is more is an overrun."""

_PR_SET_TIMERSLACK = 29
_SPIN_SECONDS = 0.00012
_BACK_TO_BACK_SECONDS = 0.003


def wait_until(deadline: float) -> None:
    """Return at `deadline` (time.perf_counter), or at once when it has passed. Blocks."""
    left = deadline - time.perf_counter()
    if left > _SPIN_SECONDS:
        time.sleep(left - _SPIN_SECONDS)
    while time.perf_counter() < deadline:
        pass


def fine_timer_slack() -> None:
    """Have the kernel wake this thread up when it asks for, not 50 microseconds later."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class DeviceClock(WorkerClock):
    """When each pass of a device ends. Passes are counted by deadline.

    A pass that began because the one before ended would have begun earlier by as much as that one
    was late: so lateness, which the device has not, does not add up.

    Times are the device's own. `dilation`: how many times longer everything takes here, for a
    device whose model really computes (workers/emulated/dilated.py).
    """

    def __init__(self, dilation: float = 1.0) -> None:
        fine_timer_slack()
        self.dilation = dilation
        self.overrun_seconds = 0.0
        self._made_good = MOST_MADE_GOOD / dilation
        self._back_to_back = _BACK_TO_BACK_SECONDS / dilation
        self._ended = 0.0
        self._late = 0.0

    def now(self) -> float:
        """The time by which `finish` reckons, in the device's seconds."""
        return time.perf_counter() / self.dilation

    def finish(self, begin: float, seconds: float) -> float:
        """Wait until a pass is over that began at `begin` (by `now`). Blocks.

        Returns when the device was done; it may be a little later by now. A pass that ends later
        than the next can make good was done then, and `overrun_seconds` says by how much.
        """
        late = self._late if begin - self._ended < self._back_to_back else 0.0
        deadline = begin - late + seconds
        wait_until(deadline * self.dilation)
        self._ended = self.now()
        self.overrun_seconds = max(0.0, self._ended - deadline - self._made_good)
        self._late = self._ended - deadline - self.overrun_seconds
        return deadline + self.overrun_seconds
