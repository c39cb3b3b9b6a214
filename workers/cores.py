"""Pinning a worker to CPU cores: on a CPU a device is one or more cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

import psutil

from paceline.errors import ConfigError


def pin_cores(cores: Collection[int]) -> None:
    """Let all threads of this process, and those to come, run on `cores` alone.

    Raises ConfigError when the machine, or this process's control group, has not got them.
    """
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cores: cannot run on {sorted(cores)} alone ({error}); "
            f"this process may use {sorted(os.sched_getaffinity(0))}"
        ) from error
    granted = os.sched_getaffinity(0)
    if granted != set(cores):
        raise ConfigError(f"cores: asked for {sorted(cores)}, of which {sorted(granted)} are there")
    # The affinity of a process is that of each of its threads; new ones inherit their creator's.
    for thread in psutil.Process().threads():
        with contextlib.suppress(ProcessLookupError):  # this thread has just ended
            os.sched_setaffinity(thread.id, cores)
