"""Loads an engine while the event loop that is going to use it keeps running."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from workers.engine.device import Device
from workers.engine.load.weight_form import Dtype, WeightForm
from workers.engine.open import AnyEngine, device_of, open_engine
from workers.engine.parallel.group import Group
from workers.engine.parallel.rank_parts import Progress
from workers.process.garbage import spare_what_is_there
from workers.process.kernels import use_kernels
from workers.process.own_thread import in_own_thread
from workers.verification.device_choice import make_ready


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
    kernels: bool = False,
    group: Group | None = None,
    progress: Progress | None = None,
) -> AnyEngine:
    """Load in a thread. Arguments and errors are those of open_engine.

    `kernels`: our own kernels run on a GPU, in this engine and all later ones of the process.
    """
    if kernels:
        use_kernels(True)
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
    where = torch.device(device_of(device))
    if where.type == "cuda":
        ready = partial(make_ready, int(engine.info.vocab_size), where)
        await in_own_thread(ready, threads=threads)
    spare_what_is_there()
    return engine
