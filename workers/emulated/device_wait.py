"""Waits until an emulated device is done, exact to some hundredths of a millisecond.

asyncio wakes up to a millisecond late. So a thread sleeps with the finest timer slack and spins for
a short time at the end. The next pass is shorter by any lateness that remains.
"""

from __future__ import annotations

import ctypes
import time

from workers.process.threads import WorkerClock

MOST_MADE_GOOD = 0.005
"""Maximum seconds of lateness by which the next pass is shortened. The rest is an overrun."""

_PR_SET_TIMERSLACK = 29
_SPIN_SECONDS = 0.00012
_BACK_TO_BACK_SECONDS = 0.003


def wait_until(deadline: float) -> None:
    """Block until `deadline` (time.perf_counter). Returns at once if it has passed."""
    left = deadline - time.perf_counter()
    if left > _SPIN_SECONDS:
        time.sleep(left - _SPIN_SECONDS)
    while time.perf_counter() < deadline:
        pass


def fine_timer_slack() -> None:
    """Have the kernel wake this thread on time, not 50 microseconds later."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class DeviceClock(WorkerClock):
    """The clock of an emulated device: decides when each of its passes ends.

    A pass has a deadline. If it directly follows a pass that ended late, its deadline is earlier by
    that lateness: on the real device it would have begun earlier. So lateness does not add up.
    """

    def __init__(self) -> None:
        fine_timer_slack()
        self.overrun_seconds = 0.0
        self._ended = 0.0
        self._late = 0.0

    def finish(self, begin: float, seconds: float) -> float:
        """Block until a pass that began at `begin` (by `now`) and takes `seconds` is over.

        Returns the time at which the device was done; the present may be a little later. Lateness
        beyond MOST_MADE_GOOD is `overrun_seconds`, and the device counts as done later by it.
        """
        late = self._late if begin - self._ended < _BACK_TO_BACK_SECONDS else 0.0
        deadline = begin - late + seconds
        wait_until(deadline)
        self._ended = self.now()
        self.overrun_seconds = max(0.0, self._ended - deadline - MOST_MADE_GOOD)
        self._late = self._ended - deadline - self.overrun_seconds
        return deadline + self.overrun_seconds
