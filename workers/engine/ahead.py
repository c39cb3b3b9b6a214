"""Checks a checkpoint's configuration before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from workers.engine.cpu.kv_cache import BLOCK_SIZE, block_bytes
from workers.engine.cpu.linears import activation_dtype
from workers.engine.cuda.kv_cache import PAGE_SIZE, page_bytes
from workers.engine.cuda.loading import dtype_of
from workers.engine.kv_sizes import kv_sizes_of, num_blocks_in
from workers.engine.load.checkpoint import choose_length, inspect_checkpoint
from workers.engine.load.weight_form import Dtype, WeightForm, form_on_cpu
from workers.engine.model import part_config
from workers.engine.open import CPU_KV_BYTES
from workers.engine.parallel.sharding import Place


def check_ahead(
    folder: Path,
    *,
    device: Literal["cpu", "cuda"],
    weights: WeightForm,
    kv_memory_bytes: int | None,
    dtype: Dtype = "auto",
    max_model_len: int | None = None,
    degree: int = 1,
) -> None:
    """Check the options that open_engine will get on each of `degree` ranks.

    Raises CheckpointError. Raises ConfigError, with the numbers, if the device has no kernels for
    the dtype, the checkpoint does not support the length, there are more ranks than heads, or the
    KV memory does not hold one sequence. Only the worker can tell how much memory there is.
    """
    info = inspect_checkpoint(folder)
    length = choose_length(max_model_len, info.max_model_len)
    if device == "cpu":
        kv_dtype = activation_dtype(form_on_cpu(dtype, weights))
        kv_memory_bytes = CPU_KV_BYTES if kv_memory_bytes is None else kv_memory_bytes
    else:
        kv_dtype = dtype_of(dtype, info)
    for rank in range(degree):
        sizes = kv_sizes_of(part_config(folder, Place(rank, degree)))
        if kv_memory_bytes is None:
            continue  # the profile run decides
        on_cpu = device == "cpu"
        num_blocks_in(
            kv_memory_bytes,
            per_block=(block_bytes if on_cpu else page_bytes)(**sizes, dtype=kv_dtype),
            block_size=BLOCK_SIZE if on_cpu else PAGE_SIZE,
            max_model_len=length,
        )
