"""How long the threads of a process that compute stood in line for a core which others had.

A step whose threads share it takes as long as the one that is held up most, and while one stands in
line the others wait for it. So a kernel thread that takes one of two cores for 60 ms makes a step
that it meets up to twice as long, whatever the step does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_NANOSECONDS = 1e-9


class CoreWaits:
    """Reads what Linux counts for each thread (/proc/PID/task/TID/schedstat)."""

    def __init__(self, pid: int, threads: int) -> None:
        """Of the `threads` threads that have computed most so far."""
        ran = {}
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            if (times := _times(task)) is not None:
                ran[task] = times[0]
        self._tasks = sorted(ran, key=lambda task: -ran[task])[:threads]
        self._waited = [0.0] * len(self._tasks)

    @property
    def are_known(self) -> bool:
        """Whether this system counts them."""
        return bool(self._tasks)

    def read(self) -> list[float]:
        """Seconds that each thread has waited in all. One that has ended waits no more."""
        for index, task in enumerate(self._tasks):
            if (times := _times(task)) is not None:
                self._waited[index] = times[1]
        return list(self._waited)


def longest_wait(earlier: Sequence[float], later: Sequence[float]) -> float:
    """Of the thread that waited most between two readings, in seconds; 0 without threads."""
    return max((after - before for before, after in zip(earlier, later, strict=True)), default=0.0)


def _times(task: Path) -> tuple[float, float] | None:
    """Seconds that a thread ran and that it waited for a core; None: it has ended."""
    try:
        ran, waited, _ = task.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return int(ran) * _NANOSECONDS, int(waited) * _NANOSECONDS
