"""Which engine opens a checkpoint, what is refused, and what loading leaves behind."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.errors import CheckpointError, ConfigError
from tests.processor import NEEDS_BFLOAT16
from tests.tiny import make_tiny_checkpoint
from workers.engine.cpu.engine import CpuEngine
from workers.engine.load.checkpoint import inspect_checkpoint
from workers.engine.load.model import dtype_on_gpu
from workers.engine.open import CPU_KV_BYTES, load_engine, open_engine
from workers.engine.options import Device, Dtype, form_on_cpu

NO_GPU = not torch.cuda.is_available()


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("auto", marks=pytest.mark.skipif(not NO_GPU, reason="there is a GPU"))],
)
def test_a_cpu_gets_the_cpu_engine(tmp_path: Path, device: Device) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    threads = torch.get_num_threads()
    engine = open_engine(
        folder, weights="float32", threads=threads, kv_memory_bytes=None, device=device
    )
    assert isinstance(engine, CpuEngine)
    # 2 layers, keys and values, 2 heads of 8, 128 positions, float32
    assert engine.num_blocks == CPU_KV_BYTES // (2 * 2 * 2 * 8 * 128 * 4)


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sees none.*CUDA_VISIBLE_DEVICES"):
        open_engine(tmp_path, weights="float32", threads=1, kv_memory_bytes=None, device="cuda")


def test_the_type_on_a_gpu_is_the_checkpoints(tmp_path: Path) -> None:
    info = inspect_checkpoint(make_tiny_checkpoint(tmp_path))
    assert dtype_on_gpu("auto", info) == torch.float32
    assert dtype_on_gpu("auto", replace(info, dtype="bfloat16")) == torch.bfloat16
    assert dtype_on_gpu("float32", replace(info, dtype="bfloat16")) == torch.float32
    with pytest.raises(CheckpointError, match=r"stored as int4.*target\.dtype"):
        dtype_on_gpu("auto", replace(info, dtype="int4"))
    with pytest.raises(ConfigError, match=r"int8 is for CPUs; on a GPU use float32, bfloat16"):
        dtype_on_gpu("int8", info)


@NEEDS_BFLOAT16
def test_a_cpu_holds_the_target_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    kinds: dict[Dtype, torch.dtype] = {"auto": torch.float32, "bfloat16": torch.bfloat16}
    for dtype, kind in kinds.items():
        engine = open_engine(
            folder, weights="float32", threads=1, kv_memory_bytes=1 << 20, device="cpu", dtype=dtype
        )
        assert isinstance(engine, CpuEngine)
        assert engine._cache.layers[0].keys_NHBD.dtype == kind
        assert engine.batch_invariant


def test_the_form_on_a_cpu_is_the_one_asked_for_else_the_models_own() -> None:
    assert form_on_cpu("auto", "int4") == "int4"
    assert form_on_cpu("int8", "float32") == "int8"
    assert form_on_cpu("float16", "float32") == "float16"


async def test_the_thread_that_loaded_is_gone(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    before = set(threading.enumerate())
    names: set[str] = set()

    async def watch() -> None:
        while True:
            names.update(thread.name for thread in set(threading.enumerate()) - before)
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    opening = partial(open_engine, folder, weights="float32", threads=1, kv_memory_bytes=1 << 20)
    await load_engine(opening, threads=1)
    watching.cancel()
    assert any(name.startswith("load") for name in names)  # it loaded beside the event loop
    assert not [t for t in threading.enumerate() if t.name.startswith("load")]
