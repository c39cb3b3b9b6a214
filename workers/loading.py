"""Loading an engine beside a running event loop that is going to use it."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import torch

from workers.engine.engine import Engine
from workers.engine.linears import WeightForm


async def load_engine(
    folder: Path,
    *,
    weights: WeightForm,
    threads: int,
    kv_memory_bytes: int,
    max_model_len: int | None = None,
) -> Engine:
    """Load in a thread; arguments and errors are those of Engine."""
    engine = await asyncio.to_thread(
        Engine,
        folder,
        weights=weights,
        threads=threads,
        kv_memory_bytes=kv_memory_bytes,
        max_model_len=max_model_len,
    )
    # OpenMP keeps the number per thread, and this is the thread that steps.
    torch.set_num_threads(threads)
    # What was loaded stays: without this, a full collection walks all of it in the midst of a step.
    gc.collect()
    gc.freeze()
    return engine
