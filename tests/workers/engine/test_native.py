"""Our own CPU kernels: their products, what they refuse, and what runs where they are missing.

That a row has the same bits in any step is tested for them, too, in test_invariance.py.
"""

from __future__ import annotations

import logging
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import make_tiny_checkpoint
from workers.engine.cpu import native
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cpu.native import GROUP_SIZE, PanelLinear, quantize_channels, quantize_groups
from workers.engine.options import WeightForm
from workers.engine.slices import Slice

NEEDS_KERNELS = pytest.mark.skipif(
    native.kernels() is None, reason="this processor or this machine cannot run the kernels"
)
SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}


@pytest.fixture(autouse=True)
def keep_thread_count() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def forms() -> list[WeightForm]:
    return ["float32", "int8", "int4", "bfloat16"]


NEEDS_BFLOAT16 = pytest.mark.skipif(
    native.kernels() is None or not native.multiplies_halves(),
    reason="this processor lacks AMX and AVX512-BF16",
)


@NEEDS_KERNELS
@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (96, 33), (1536, 576)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_linear(
    form: WeightForm, inputs: int, outputs: int, bias: bool
) -> None:
    torch.manual_seed(1)
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    plain = nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
    packed = PanelLinear(plain, form)
    torch.set_num_threads(2)
    rows_TN = torch.randn(150, inputs).to(dtype)
    result = packed(rows_TN)
    expected = nn.functional.linear(
        rows_TN.double(),
        as_kept(plain.weight, form).double(),
        None if plain.bias is None else plain.bias.double(),
    )
    bound = 4e-3 if form == "bfloat16" else 5e-6
    assert float((result - expected).abs().max()) <= bound * float(expected.abs().max()) + 1e-6
    for count in (1, 11, 13, 33):
        assert torch.equal(packed(rows_TN[:count]), result[:count])


@NEEDS_BFLOAT16
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 33), (1536, 576)])
def test_many_rows_are_rounded_and_multiplied_by_unpacked_weights(
    form: WeightForm, inputs: int, outputs: int
) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(inputs, outputs).requires_grad_(False)
    packed = PanelLinear(plain, form)
    torch.set_num_threads(2)
    rows_TN = torch.randn(700, inputs)
    exact = packed(rows_TN)
    packed.unpacked_from = 150
    rounded = packed(rows_TN)
    kept_MN = as_kept(plain.weight, form)
    if form == "int4":
        kept_MN = kept_MN.bfloat16()  # steps of 8 bits need no rounding
    expected = nn.functional.linear(
        rows_TN.bfloat16().double(), kept_MN.double(), plain.bias.double()
    )
    assert float((rounded - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert not torch.equal(rounded, exact)
    assert torch.equal(packed(rows_TN[:150]), rounded[:150])
    assert torch.equal(packed(rows_TN[:149]), exact[:149])


@NEEDS_BFLOAT16
@pytest.mark.parametrize("form", ["int8", "float32"])
def test_only_a_drafter_rounds_many_rows(tmp_path: Path, form: WeightForm) -> None:
    folder = make_tiny_checkpoint(tmp_path, **SIZES)
    prompt = Slice([0], 0, [3 + token % 50 for token in range(100)], 100)
    few = Slice([0], 0, prompt.token_ids[:10], 10)
    target, drafter = (
        CpuEngine(folder, weights=form, threads=2, drafts=drafts, kv_memory_bytes=1 << 20)
        for drafts in (False, True)
    )
    exact, logits = target.step([prompt]), drafter.step([prompt])
    assert float((logits - exact).norm()) <= 0.05 * float(exact.norm())
    assert torch.equal(logits, exact) == (form == "float32") == drafter.batch_invariant
    assert torch.equal(drafter.step([few]), exact[:10])
    assert torch.equal(target.step([few]), exact[:10])
    assert target.batch_invariant


def as_kept(weight_MN: Tensor, form: WeightForm) -> Tensor:
    """The weights that a form of few bits stands for."""
    if form == "int8":
        steps_MN, scale_M = quantize_channels(weight_MN)
        return steps_MN * scale_M.double()[:, None]
    if form == "int4":
        steps_MN, scale_MG, minimum_MG = quantize_groups(weight_MN)
        steps_MGS = steps_MN.double().unflatten(1, (-1, GROUP_SIZE))
        weights_MGS: Tensor = (
            steps_MGS * scale_MG[..., None].double() + minimum_MG[..., None].double()
        )
        weight: Tensor = weights_MGS.flatten(1)
        return weight
    return weight_MN


@NEEDS_KERNELS
def test_a_nan_stays_with_its_sequence(tmp_path: Path) -> None:
    engine = CpuEngine(make_tiny_checkpoint(tmp_path, **SIZES), threads=1, kv_memory_bytes=1 << 20)
    assert engine._native is not None
    well = engine.step([Slice([1], 0, [5, 6, 7], 1)])
    engine.step([Slice([0], 0, [3, 4], 0)])
    engine._cache.layers[0].keys_NHBD[0, 0, 0] = torch.nan
    rows = engine.step([Slice([0], 2, [5], 1), Slice([1], 2, [7], 1)])
    assert rows[0].isnan().all()
    assert torch.equal(rows[1:], well)


@NEEDS_KERNELS
@pytest.mark.parametrize("form", forms())
def test_slots_that_were_not_written_do_not_matter(tmp_path: Path, form: WeightForm) -> None:
    folder = make_tiny_checkpoint(tmp_path, **SIZES)
    engine = CpuEngine(folder, weights=form, threads=2, kv_memory_bytes=1 << 20)
    assert engine._native is not None
    steps = [[Slice([1, 2], start, [5] * count, count)] for start, count in ((0, 3), (3, 130))]
    expected = [engine.step(step) for step in steps]
    for layer in engine._cache.layers:
        layer.slots_2HSD.fill_(torch.nan)
    for step, rows in zip(steps, expected, strict=True):
        assert torch.equal(engine.step(step), rows)


@NEEDS_KERNELS
@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this processor lacks AVX512-BF16"
)
def test_bfloat16_without_amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "bfloat16" in forms()
    library = native.kernels()
    assert library is not None
    not_granted = Path(shutil.copy(library._name, tmp_path))
    monkeypatch.setattr(native, "_compiled", lambda width: not_granted)
    native.kernels.cache_clear()
    try:
        test_a_product_is_that_of_linear("bfloat16", 96, 33, True)
        folder = make_tiny_checkpoint(tmp_path / "model", **SIZES)
        engine = CpuEngine(folder, weights="bfloat16", threads=2, kv_memory_bytes=1 << 20)
        assert engine._native is not None
        assert engine.batch_invariant
    finally:
        native.kernels.cache_clear()


@NEEDS_KERNELS
def test_other_sizes_and_forms_run_without_them(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, **{**SIZES, "head_dim": 16})
    assert CpuEngine(folder, threads=1, kv_memory_bytes=1 << 20)._native is None
    folder = make_tiny_checkpoint(tmp_path / "fits", **SIZES)
    float16 = CpuEngine(folder, weights="float16", threads=1, kv_memory_bytes=1 << 20)
    assert float16._native is None


@NEEDS_KERNELS
def test_only_our_kernels_take_more_threads_than_cores_of_their_own(tmp_path: Path) -> None:
    for head_dim, expected in ((32, 2), (16, 1)):
        folder = make_tiny_checkpoint(tmp_path / str(head_dim), **{**SIZES, "head_dim": head_dim})
        engine = CpuEngine(folder, threads=1, most_threads=2, kv_memory_bytes=1 << 20)
        assert engine.batch_invariant
        engine.step([Slice([0], 0, [3, 4, 5], 3)])
        assert (engine._native is not None, torch.get_num_threads()) == (expected == 2, expected)


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ("compiler", "there is no C++ compiler"),
        ("flag", "c++: unrecognized option"),
        ("width", "need AVX2 or NEON, which this processor lacks (DEFAULT)"),
    ],
)
def test_without_the_kernels_torch_runs_the_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lacking: str,
    said: str,
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", **SIZES)
    piece = Slice([0], 0, [3, 4, 5], 3)
    expected = CpuEngine(folder, threads=1, kv_memory_bytes=1 << 20).step([piece])
    source = tmp_path / "step_kernels.cpp"
    shutil.copy(native._SOURCE, source)
    monkeypatch.setattr(native, "_SOURCE", source)
    monkeypatch.setenv("PATH", str(tmp_path))
    if lacking == "flag":
        compiler = tmp_path / "c++"
        compiler.write_text("#!/bin/sh\necho 'c++: unrecognized option' >&2; exit 1\n")
        compiler.chmod(0o755)
    if lacking == "width":
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    native.kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        engine = CpuEngine(folder, threads=1, kv_memory_bytes=1 << 20)
        CpuEngine(folder, threads=1, kv_memory_bytes=1 << 20)
    native.kernels.cache_clear()
    assert engine._native is None
    assert caplog.text.count("steps on this CPU are slower") == 1
    assert said in caplog.text
    assert torch.allclose(engine.step([piece]), expected, atol=1e-4)
