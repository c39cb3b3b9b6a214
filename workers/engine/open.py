"""Opens a checkpoint as an engine. Only this module chooses between CPU and GPU.

Workers call `load_engine`. `check_ahead` finds, before any process starts, the errors that an
engine would raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from paceline.errors import ConfigError
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cpu.kv_cache import BLOCK_SIZE, block_bytes
from workers.engine.cpu.linears import activation_dtype
from workers.engine.cuda.kv_cache import PAGE_SIZE, kv_dtype_of, page_bytes
from workers.engine.engine import Engine
from workers.engine.load.checkpoint import choose_length, inspect_checkpoint
from workers.engine.load.model import dtype_on_gpu, kv_scales_of, load_on_gpu, part_config
from workers.engine.memory import kv_sizes_of, num_blocks_in
from workers.engine.options import (
    Device,
    Dtype,
    KvDtype,
    UseKernels,
    WeightForm,
    form_on_cpu,
)
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.sharding import Progress
from workers.engine.parallel.weight_cuts import Place
from workers.process.kernels import use_kernels
from workers.process.settings import freeze_present_objects
from workers.process.threads import in_own_thread
from workers.verification.device_choice import make_ready

CPU_KV_BYTES = 1 << 30
"""Bytes of KV memory on a CPU if none are given."""


def open_engine(
    folder: Path,
    *,
    weights: WeightForm,
    threads: int,
    cores: Sequence[int] | None = None,
    kv_memory_bytes: int | None,
    kv_tokens: int | None = None,
    max_model_len: int | None = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    batch_invariant: bool = True,
    drafts: bool = False,
    kernels: UseKernels = False,
    group: RankGroup | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> Engine:
    """Load a checkpoint, or with a `group` this rank's part of it.

    `weights`: the form on a CPU if `dtype` is "auto"; a GPU then takes the checkpoint's dtype.
    `kv_dtype`: that of stored keys and values. `threads` and `cores` (those that this process is
    pinned to; a step may use as many threads) are for a CPU. `batch_invariant` is for a GPU (a
    target on a CPU is always invariant), and so is `kernels`: whether this engine, and all later
    ones of the process, use our own (process/kernels.py). `drafts`: the engine is a drafter's; a
    CPU then reads prompts faster by weights of few bits, with other roundings. `kv_memory_bytes`
    None: CPU_KV_BYTES on a CPU; on a GPU the memory that a profile run leaves, but at most that for
    `kv_tokens` tokens, if this is given. `max_model_len` may lower the checkpoint's own. `progress`
    is called after each tensor. `cache`: see CpuEngine.

    Raises CheckpointError. Raises ConfigError if a GPU is requested but the process sees none, if
    memory does not suffice, or if the device has no kernels for `dtype` or `kv_dtype`.
    """
    if kernels is not False:
        use_kernels(kernels)
    where = device_of(device)
    if where == "cpu":
        _refuse_on_cpu(kv_dtype)
        return CpuEngine(
            folder,
            weights=form_on_cpu(dtype, weights),
            threads=threads,
            most_threads=None if cores is None else len(cores),
            kv_memory_bytes=CPU_KV_BYTES if kv_memory_bytes is None else kv_memory_bytes,
            max_model_len=max_model_len,
            drafts=drafts,
            group=group,
            progress=progress,
            cache=cache,
        )
    from workers.engine.cuda.engine import CudaEngine, CudaOptions

    info = inspect_checkpoint(folder)
    gpu, stored_as = torch.device(where), dtype_on_gpu(dtype, info)
    kv_scales_L2H = None
    if kv_dtype == "fp8":
        kv_scales_L2H = kv_scales_of(folder, Place() if group is None else group.place)
    model = load_on_gpu(folder, gpu, stored_as, group, progress, keep_fp8=dtype == "auto")
    engine = CudaEngine(
        model,
        info,
        CudaOptions(
            kv_memory_bytes=kv_memory_bytes,
            kv_tokens=kv_tokens,
            max_model_len=max_model_len,
            batch_invariant=batch_invariant,
            kv_dtype=kv_dtype,
        ),
        group=group,
        kv_scales_L2H=kv_scales_L2H,
    )
    if group is None or not group.place.rank:  # Rank 0 chooses the tokens.
        make_ready(int(info.vocab_size), gpu)
    return engine


def _refuse_on_cpu(kv_dtype: KvDtype) -> None:
    if kv_dtype != "auto":
        raise ConfigError(f'kv_cache_dtype "{kv_dtype}" is for GPUs; on a CPU use "auto"')


def device_of(device: Device) -> str:
    """torch's name of the device: "cpu", or the first GPU that this process sees.

    Raises ConfigError if a GPU is requested but the process sees none.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(
            "a GPU was requested, but this process sees none: check the driver, torch's build "
            f"({torch.__version__}) and CUDA_VISIBLE_DEVICES, or use the device cpu"
        )
    return "cuda:0" if available and device != "cpu" else "cpu"


async def load_engine(opening: Callable[[], Engine], *, threads: int) -> Engine:
    """What `opening` returns, a call of `open_engine`. It runs in a thread of its own."""
    engine = await in_own_thread(opening, threads=threads)
    freeze_present_objects()
    return engine


def check_ahead(
    folder: Path,
    *,
    device: Literal["cpu", "cuda"],
    weights: WeightForm,
    kv_memory_bytes: int | None,
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    max_model_len: int | None = None,
    degree: int = 1,
) -> None:
    """Check the options that `open_engine` will get on each of `degree` ranks. Loads no weights.

    Raises CheckpointError. Raises ConfigError, with the numbers, if the device has no kernels for
    the dtypes, the checkpoint does not support the length, there are more ranks than heads, or the
    KV memory does not hold one sequence. Only the worker checks the memory of its device.
    """
    info = inspect_checkpoint(folder)
    length = choose_length(max_model_len, info.max_model_len)
    if device == "cpu":
        _refuse_on_cpu(kv_dtype)
        stored_as = activation_dtype(form_on_cpu(dtype, weights))
        kv_memory_bytes = CPU_KV_BYTES if kv_memory_bytes is None else kv_memory_bytes
    else:
        stored_as = kv_dtype_of(kv_dtype, dtype_on_gpu(dtype, info))
    for rank in range(degree):
        if kv_dtype == "fp8":
            kv_scales_of(folder, Place(rank, degree))
        sizes = kv_sizes_of(part_config(folder, Place(rank, degree)))
        if kv_memory_bytes is None:
            continue  # a profile run will decide
        on_cpu = device == "cpu"
        num_blocks_in(
            kv_memory_bytes,
            per_block=(block_bytes if on_cpu else page_bytes)(**sizes, dtype=stored_as),
            block_size=BLOCK_SIZE if on_cpu else PAGE_SIZE,
            max_model_len=length,
        )
