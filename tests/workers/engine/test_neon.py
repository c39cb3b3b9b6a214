"""Our CPU kernels on aarch64: compiled by Debian's cross-compiler, run under qemu-user.

A tiny engine on this host, with panels of the same size (AVX2), lays out a model and steps. The
program run_steps.cpp gets its memory and runs the same steps.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny import make_tiny_checkpoint
from workers.engine.cpu import native
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cpu.native import NativeForward, PanelLinear
from workers.engine.options import WeightForm
from workers.engine.slices import Slice

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROGRAM = Path(__file__).with_name("run_steps.cpp")
VOCAB, LENGTH = 390, 140
NUMBERS, POINTERS, STEP = range(3)
Region = tuple[int, bytes, int]

pytestmark = [
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
        reason="Debian's packages g++-aarch64-linux-gnu and qemu-user are not installed",
    ),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the steps are laid out by AVX2"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("neon") / "run_steps"
    flags = (*native._FLAGS, *native._WIDTHS["NEON"], f"-I{native._SOURCE.parent}", "-static")
    warnings = ("-Wall", "-Wextra", "-Werror")
    kept = [flag for flag in flags if flag not in ("-shared", "-fPIC")]
    subprocess.run([COMPILER, *kept, *warnings, str(PROGRAM), "-o", str(made)], check=True)
    return made


@pytest.fixture
def by_avx2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "width_of_vectors", lambda: "AVX2")
    native.kernels.cache_clear()
    yield
    native.kernels.cache_clear()


@pytest.mark.usefixtures("by_avx2")
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
def test_a_row_has_the_same_bits_in_any_step(
    tmp_path: Path, program: Path, form: WeightForm
) -> None:
    folder = make_tiny_checkpoint(
        tmp_path,
        architecture="qwen3",
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=160,
        head_dim=32,
    )
    engine = CpuEngine(folder, weights=form, threads=1, kv_memory_bytes=1 << 20)
    forward = engine._native
    assert forward is not None
    ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    beside = Slice([4], 0, ids[5:12], 1)
    steps = [
        [Slice([0, 1], 0, ids, LENGTH)],
        [Slice([2, 3], 0, ids[:1], 1)],
        [beside, Slice([2, 3], 1, ids[1:8], 7)],
        [Slice([2, 3], 8, ids[8:131], 123), beside],
        [Slice([2, 3], 131, ids[131:], 9)],
    ]
    said = subprocess.run(
        [EMULATOR, str(program)],
        input=b"".join(
            struct.pack("<QQQ", address, len(read), kind) + read
            for address, read, kind in laid_out(forward, engine, steps)
        ),
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    rows = torch.from_numpy(np.frombuffer(said.stdout, np.float32).copy()).view(-1, VOCAB)
    whole, parts = rows[:LENGTH], rows[LENGTH:]
    others = (1, 1 + 7 + 1 + 123)  # the rows of the sequence beside it
    assert torch.equal(parts[others[0]], parts[others[1]])
    kept = [row for row in range(len(parts)) if row not in others]
    assert torch.equal(parts[kept], whole)
    expected = engine.step(steps[0])
    assert float((whole - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def laid_out(
    forward: NativeForward, engine: CpuEngine, steps: list[list[Slice]]
) -> Iterator[Region]:
    """The memory that the kernels read and write in these steps."""
    yield structure(forward._model)
    yield structure(forward._layers)
    model: Any = next(one for one in forward._kept if isinstance(one, torch.nn.Module))
    linears = [one for one in model.modules() if isinstance(one, PanelLinear)]
    tensors = [one for one in forward._kept if isinstance(one, Tensor)]
    tensors += [layer.slots_2HSD for layer in engine._cache.layers]
    tensors += [part for one in linears for part in (one.panels, one.bias) if part is not None]
    yield from map(memory_of, tensors)
    made = []  # all at once, so that no address is used again
    for slices in steps:
        logits_TV = torch.zeros(sum(piece.num_logits for piece in slices), VOCAB)
        made.append((*forward._step(slices, logits_TV), logits_TV))
    for step, kept, logits_TV in made:
        yield memory_of(logits_TV)
        for one in kept:
            yield structure(one) if isinstance(one, ctypes.Array) else memory_of(one)
        yield structure(step, STEP)


def structure(one: Any, kind: int = POINTERS) -> Region:
    return ctypes.addressof(one), bytes(one), kind


def memory_of(one: Any) -> Region:
    if isinstance(one, Tensor):
        size = one.numel() * one.itemsize
        return one.data_ptr(), ctypes.string_at(one.data_ptr(), size), NUMBERS
    address, _ = one.buffer_info()
    return address, one.tobytes(), NUMBERS
