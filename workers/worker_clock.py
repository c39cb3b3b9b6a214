"""The clock by which a worker tells how long things took."""

from __future__ import annotations

import time


class WorkerClock:
    """That of a real device. An emulated one has its own (workers/emulated/device_clock.py)."""

    overrun_seconds = 0.0
    """By how much the last pass took longer than the device would have. A real one: never."""

    def now(self) -> float:
        """Seconds, from no particular moment."""
        return time.perf_counter()
