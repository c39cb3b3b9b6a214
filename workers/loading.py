"""Loading an engine beside a running event loop that is going to use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from workers.engine.open import AnyEngine, Device, open_engine
from workers.engine.rank_parts import Progress
from workers.engine.tensor_parallel.group import Group
from workers.engine.weight_form import Dtype, WeightForm
from workers.garbage import spare_what_is_there

Result = TypeVar("Result")


async def load_engine(
    folder: Path,
    *,
    weights: WeightForm,
    threads: int,
    kv_memory_bytes: int | None,
    max_model_len: int | None = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    batch_invariant: bool = True,
    group: Group | None = None,
    progress: Progress | None = None,
) -> AnyEngine:
    """Load in a thread; arguments and errors are those of open_engine."""
    load = partial(
        open_engine,
        folder,
        weights=weights,
        threads=threads,
        kv_memory_bytes=kv_memory_bytes,
        max_model_len=max_model_len,
        device=device,
        dtype=dtype,
        batch_invariant=batch_invariant,
        group=group,
        progress=progress,
    )
    engine = await in_own_thread(load, threads=threads)
    spare_what_is_there()
    return engine


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
