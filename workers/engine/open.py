"""Opens a checkpoint as an engine, on a CPU or on a GPU. The one place that chooses."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.errors import ConfigError
from workers.engine.cpu.engine import Engine
from workers.engine.cuda.engine import CudaEngine, CudaOptions
from workers.engine.cuda.loading import dtype_of, load_on_device, load_part_on_device
from workers.engine.device import Device
from workers.engine.load.checkpoint import inspect_checkpoint
from workers.engine.load.weight_form import Dtype, WeightForm, form_on_cpu
from workers.engine.parallel.group import Group
from workers.engine.parallel.rank_parts import Progress

AnyEngine = Engine | CudaEngine

CPU_KV_BYTES = 1 << 30
"""KV memory on a CPU if none is given."""


def open_engine(
    folder: Path,
    *,
    weights: WeightForm,
    threads: int,
    kv_memory_bytes: int | None,
    max_model_len: int | None = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    batch_invariant: bool = True,
    group: Group | None = None,
    progress: Progress | None = None,
) -> AnyEngine:
    """Load a checkpoint. Device "auto": a GPU if this process sees one.

    `weights`: the form on a CPU if `dtype` is "auto"; a GPU then takes the checkpoint's dtype.
    `threads` is for a CPU, `batch_invariant` for a GPU (a CPU is always invariant). `group` and
    `progress` are those of Engine. `kv_memory_bytes` None: 1 GiB on a CPU, and on a GPU what a
    profile run leaves.

    Raises what Engine raises. Raises ConfigError also if a GPU is requested but none is seen, if
    its memory does not suffice, and for a `dtype` that the device has no kernels for.
    """
    where = device_of(device)
    if where == "cpu":
        return Engine(
            folder,
            weights=form_on_cpu(dtype, weights),
            threads=threads,
            kv_memory_bytes=CPU_KV_BYTES if kv_memory_bytes is None else kv_memory_bytes,
            max_model_len=max_model_len,
            group=group,
            progress=progress,
        )
    info = inspect_checkpoint(folder)
    gpu, stored_as = torch.device(where), dtype_of(dtype, info)
    if group is None:
        model = load_on_device(folder, gpu, stored_as)
    else:
        model = load_part_on_device(folder, gpu, stored_as, group, progress)
    return CudaEngine(
        model,
        info,
        CudaOptions(
            kv_memory_bytes=kv_memory_bytes,
            max_model_len=max_model_len,
            batch_invariant=batch_invariant,
        ),
        group=group,
    )


def device_of(device: Device) -> str:
    """torch's name of the device: "cpu", or the first GPU that this process sees.

    Raises ConfigError if a GPU is requested but none is seen.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(
            "a GPU was requested, but this process sees none: check the driver, torch's build "
            f"({torch.__version__}) and CUDA_VISIBLE_DEVICES, or use the device cpu"
        )
    return "cuda:0" if available and device != "cpu" else "cpu"
