"""Pin a worker to CPU cores. A CPU device is one or more cores."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from paceline.errors import ConfigError


def pin_cores(cores: Collection[int]) -> None:
    """Let all threads of this process, present and future, run on `cores` only.

    Raises ConfigError if the machine, or this process's control group, does not have them.
    """
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cores: cannot run on {sorted(cores)} only ({error}); "
            f"this process may use {sorted(os.sched_getaffinity(0))}"
        ) from error
    granted = os.sched_getaffinity(0)
    if granted != set(cores):
        raise ConfigError(f"cores: asked for {sorted(cores)}, got {sorted(granted)}")
    # Affinity is set per thread; a new thread inherits that of its creator.
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # the thread has just ended
            continue
