"""Loading an engine beside a running event loop that is going to use it."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from workers.engine.cuda.loading import Dtype
from workers.engine.open import AnyEngine, Device, open_engine
from workers.engine.weight_form import WeightForm


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
    )
    # The thread must end: OpenMP gives each thread that computes helpers of its own, and while
    # there are more of them than cores they sleep between two products instead of spinning. Two
    # threads then took 26.5 ms a step where they take 17.
    with ThreadPoolExecutor(1, thread_name_prefix="load") as loader:
        engine = await asyncio.get_running_loop().run_in_executor(loader, load)
    # OpenMP keeps the number per thread, and this is the thread that steps.
    torch.set_num_threads(threads)
    # What was loaded stays: without this, a full collection walks all of it in the midst of a step.
    gc.collect()
    gc.freeze()
    return engine
