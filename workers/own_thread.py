"""Computing something beside a running event loop, whose thread is going to compute after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


async def in_own_thread(work: Callable[[], Result], *, threads: int) -> Result:
    """Compute something, with so many threads, while the event loop goes on."""

    def run() -> Result:
        torch.set_num_threads(threads)
        return work()

    # The thread must end: OpenMP gives each thread that computes helpers of its own, and while
    # there are more of them than cores they sleep between two products instead of spinning. Two
    # threads then took 26.5 ms a step where they take 17.
    with ThreadPoolExecutor(1, thread_name_prefix="load") as executor:
        result = await asyncio.get_running_loop().run_in_executor(executor, run)
    # OpenMP keeps the number per thread, and this is the thread that steps.
    torch.set_num_threads(threads)
    return result
