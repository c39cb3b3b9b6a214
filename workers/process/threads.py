"""How a worker's process works: its cores, its clock, long work beside its event loop, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

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


class Begun(Generic[Result]):
    """Runs a coroutine at once, up to its first wait. Await it once, from a task, or `cancel` it.

    An asyncio task starts its coroutine one turn of the event loop later, and reports its end
    another turn later. Between a verdict and the next step, the target would be idle for longer.

    The coroutine may wait only for futures of the event loop. If the coroutine raises an exception,
    awaiting this object raises the same one.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self._coroutine = coroutine
        self._waits_for: asyncio.Future[Any] | None = None
        self._end: Exception | None = None
        self._resume(None)

    def __await__(self) -> Generator[Any, None, Result]:
        while self._end is None:
            thrown: BaseException | None = None
            if self._waits_for is None or not self._waits_for.done():
                try:
                    yield self._waits_for
                except BaseException as error:
                    thrown = error
            self._resume(thrown)
        if not isinstance(self._end, StopIteration):
            raise self._end
        result: Result = self._end.value
        return result

    def cancel(self) -> None:
        """Close the coroutine. Call it if the result will not be awaited."""
        if self._waits_for is not None:
            self._waits_for.cancel()
        self._coroutine.close()

    def _resume(self, thrown: BaseException | None) -> None:
        """Run to the next wait or to the end. The end, by return or exception, is kept."""
        try:
            if thrown is None:
                self._waits_for = self._coroutine.send(None)
            else:
                self._waits_for = self._coroutine.throw(thrown)
        except Exception as end:
            self._end = end


class WorkerClock:
    """The clock by which a worker measures durations, of a real device.

    Emulated devices have workers/emulated/device_wait.py.
    """

    overrun_seconds = 0.0
    """Seconds by which the last pass took longer than on the emulated device; 0 for a real one."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.perf_counter()
