"""Pin a worker to CPU cores. A CPU device is one or more cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

import psutil

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
    # The affinity of a process is that of each of its threads; a new thread inherits its creator's.
    for thread in psutil.Process().threads():
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(thread.id, cores)
