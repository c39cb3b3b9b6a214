"""The CPU cores of a worker, a thread for long work while its event loop continues, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import psutil

from paceline.errors import ConfigError

Result = TypeVar("Result")

EXIT_BROKEN = 70
"""Exit status of a worker that ended because it was broken (EX_SOFTWARE of sysexits.h)."""


def pin_cores(cores: Collection[int]) -> None:
    """Let all threads of this process, present and future, run on `cores` only.

    Raises ConfigError if the machine lacks one of them, or if this process may not use one of them.
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
        raise ConfigError(
            f"cores: the system allows only {sorted(granted)} of the requested cores "
            f"{sorted(cores)}; choose among them"
        )
    # The affinity of a process is that of each of its threads; a new thread inherits its creator's.
    for thread in psutil.Process().threads():
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(thread.id, cores)


async def in_own_thread(work: Callable[[], Result], *, threads: int) -> Result:
    """Run `work` in a thread of its own while the event loop continues. Returns its result.

    `work`, and later the caller's thread, compute with `threads` CPU threads.
    """
    import torch  # Here, because a drafter without a model needs the rest of this file alone.

    def run() -> Result:
        torch.set_num_threads(threads)
        return work()

    # The thread must end. OpenMP gives each thread that computes helper threads of its own. While
    # there are more helpers than cores, they sleep between matrix products instead of spinning. A
    # step with two threads then took 26.5 ms instead of 17 ms.
    with ThreadPoolExecutor(1, thread_name_prefix="load") as executor:
        result = await asyncio.get_running_loop().run_in_executor(executor, run)
    # OpenMP keeps this number per thread, and this thread will run the steps.
    torch.set_num_threads(threads)
    return result
