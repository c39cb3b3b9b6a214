"""Pinning a worker to CPU cores: on a CPU a device is one or more cores."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from paceline.errors import ConfigError


def pin_cores(cores: Collection[int]) -> None:
    """Let all threads of this process, and those to come, run on `cores` alone.

    Raises ConfigError when the process may not use one of them.
    """
    allowed = os.sched_getaffinity(0)
    if not cores or not allowed.issuperset(cores):
        raise ConfigError(
            f"cores: expected some of the cores {sorted(allowed)} that this process may use, "
            f"got {sorted(cores)}"
        )
    # The affinity of a process is that of each of its threads; new ones inherit their creator's.
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # this thread has just ended
            continue
