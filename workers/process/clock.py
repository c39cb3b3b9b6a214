"""The clock by which a worker measures durations."""

from __future__ import annotations

import time


class WorkerClock:
    """The clock of a real device. An emulated one has its own
    (workers/emulated/device_clock.py).
    """

    overrun_seconds = 0.0
    """How much longer the last pass took than the device would have. Always 0 for a real device."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.perf_counter()
