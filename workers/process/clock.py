"""The clock by which a worker measures durations."""

from __future__ import annotations

import time


class WorkerClock:
    """The clock of a real device. Emulated devices have workers/emulated/device_clock.py."""

    overrun_seconds = 0.0
    """Seconds by which the last pass took longer than on the emulated device; 0 for a real one."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.perf_counter()
