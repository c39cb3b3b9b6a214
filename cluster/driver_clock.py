"""The clock by which the driver reckons and reports."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriverClock:
    """Monotonic seconds.

    Where devices are emulated with all times multiplied (docs/emulation.md), time passes `dilation`
    times slower on it: so waits, estimates and figures are in the devices' own time.
    """

    dilation: float = 1.0

    def now(self) -> float:
        """What time it is."""
        return time.monotonic() / self.dilation

    def on_the_loop(self, moment: float) -> float:
        """The same moment by the event loop's clock."""
        return moment * self.dilation

    def of_the_loop(self, seconds: float) -> float:
        """What the event loop did in so long, by this clock."""
        return seconds / self.dilation
