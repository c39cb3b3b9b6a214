"""Waiting until an emulated device is done, to some hundredths of a millisecond.

asyncio wakes up to a millisecond late. A thread's sleep with the finest timer slack, and a short
spin at its end, do not; and what is late all the same is made good by the next pass.
"""

from __future__ import annotations

import ctypes
import time

from workers.worker_clock import WorkerClock

MOST_MADE_GOOD = 0.005
"""Seconds of lateness that the next pass makes good. What is more is an overrun."""

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
    """

    def __init__(self) -> None:
        fine_timer_slack()
        self.overrun_seconds = 0.0
        self._ended = 0.0
        self._late = 0.0

    def finish(self, begin: float, seconds: float) -> float:
        """Wait until a pass is over that began at `begin` (by `now`). Blocks.

        Returns when the device was done; it may be a little later by now. A pass that ends later
        than the next can make good was done then, and `overrun_seconds` says by how much.
        """
        late = self._late if begin - self._ended < _BACK_TO_BACK_SECONDS else 0.0
        deadline = begin - late + seconds
        wait_until(deadline)
        self._ended = self.now()
        self.overrun_seconds = max(0.0, self._ended - deadline - MOST_MADE_GOOD)
        self._late = self._ended - deadline - self.overrun_seconds
        return deadline + self.overrun_seconds
