"""Engines of the CUDA package on either device, for tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workers.engine.cuda.engine import CudaEngine, CudaOptions
from workers.engine.load.checkpoint import inspect_checkpoint
from workers.engine.load.model import load_on_gpu
from workers.engine.options import KvDtype
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.sharding import Progress

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KV_BYTES = 4 << 20


def make_engine(
    folder: Path,
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    kv_memory_bytes: int | None = KV_BYTES,
    max_model_len: int | None = None,
    batch_invariant: bool = True,
    graphs: bool = True,
    kv_dtype: KvDtype = "auto",
    kv_scales_L2H: torch.Tensor | None = None,
) -> CudaEngine:
    info = inspect_checkpoint(folder)
    model = load_on_gpu(folder, torch.device(device), dtype)
    options = CudaOptions(
        kv_memory_bytes=kv_memory_bytes,
        max_model_len=max_model_len,
        batch_invariant=batch_invariant,
        max_step_tokens=512,
        max_num_seqs=4,
        graphs=graphs,
        kv_dtype=kv_dtype,
    )
    return CudaEngine(model, info, options, kv_scales_L2H=kv_scales_L2H)


def make_rank(
    folder: Path,
    group: RankGroup | None,
    *,
    dtype: torch.dtype = torch.float32,
    batch_invariant: bool = True,
    progress: Progress | None = None,
    keep_fp8: bool = False,
) -> CudaEngine:
    """A rank's engine on its group's device; without a group, the whole model on the CPU."""
    device = torch.device("cpu" if group is None else group.device)
    model = load_on_gpu(folder, device, dtype, group, progress, keep_fp8=keep_fp8)
    options = CudaOptions(
        kv_memory_bytes=KV_BYTES,
        batch_invariant=batch_invariant,
        max_step_tokens=512,
        max_num_seqs=4,
    )
    return CudaEngine(model, inspect_checkpoint(folder), options, group=group)
