"""Float8 KV, and the kernel that rounds rows to float8: the bits of torch's operations."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from paceline.errors import ConfigError
from tests.tiny import make_tiny_checkpoint
from tests.workers.compiling import compile_launches
from tests.workers.engine.cuda.engines import make_engine
from tests.workers.engine.cuda.launches import launch_float8
from tests.workers.engine.cuda.rounding import round_as_devices_do
from tests.workers.engine.cuda.test_attention_kernel import random_layer
from tests.workers.engine.trees import plain_rows, random_tree
from workers.engine.cuda import attention
from workers.engine.cuda.attention import Ragged, attend_by_reference
from workers.engine.cuda.attention_kernel import attend_pages
from workers.engine.cuda.engine import CudaEngine
from workers.engine.cuda.float8_kernels import round_rows
from workers.engine.cuda.kernel_check import ModelSizes, find_fault
from workers.engine.cuda.kv_cache import FLOAT8, PAGE_SIZE, LayerPages, rounded, slot_of
from workers.engine.cuda.layer_kernels import add_and_norm, gate, rotate_and_store
from workers.engine.cuda.linears import (
    FIXED_ROWS,
    FixedRowsLinear,
    Fp8Linear,
    RoundedRows,
    Rounding,
    to_fp8,
)
from workers.engine.cuda.tree_kernel import attend_paths
from workers.engine.load.stored_tensors import Fp8Weight
from workers.engine.open import check_ahead, open_engine
from workers.engine.self_test import trees_are_invariant
from workers.engine.slices import Slice

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU, so nothing is interpreted"
)
CPU = torch.device("cpu")
LENGTH = 300
TOKEN_IDS = torch.randint(384, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
TABLE = [5, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("float8"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> CudaEngine:
    return make_engine(folder, "cpu", kv_dtype="fp8")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def as_bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def test_four_times_the_pages_hold_nearly_the_same_model(
    folder: Path, engine: CudaEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Of float32. Logits move, but by less than rounding numbers to three bits may move them."""
    plain = make_engine(folder, "cpu")
    with caplog.at_level(logging.WARNING):
        make_engine(folder, "cpu", kv_dtype="fp8")
    (line,) = [one for one in caplog.messages if "KV" in one]
    assert "keeps the text of this model with rounded keys and values" in line
    assert (plain.dtype, engine.dtype) == ("float32", "float32 with float8_e4m3fn KV")
    assert engine.num_blocks == 4 * plain.num_blocks
    rows, exact = (one.step([Slice(TABLE, 0, TOKEN_IDS, LENGTH)]) for one in (engine, plain))
    assert 1e-4 < float((rows - exact).norm() / exact.norm()) < 0.15


def test_a_row_is_its_own_in_windows_and_splits(engine: CudaEngine) -> None:
    """Also while its keys are only now stored: attention reads what is stored, in any step."""
    whole = engine.step([Slice(TABLE, 0, TOKEN_IDS, LENGTH)])
    rows = [engine.step([Slice([7, 0], 0, TOKEN_IDS[:130], 130), Slice([6], 0, [4, 5], 0)])]
    for start in range(130, LENGTH, 17):
        fed = TOKEN_IDS[start : start + 17]
        rows.append(engine.step([Slice([7, 0], start, fed, len(fed))]))
    # The reference's sums depend on the window, so a number on an edge may be stored differently.
    apart = (torch.cat(rows) - whole).abs().amax(dim=1) / whole.abs().amax()
    assert float(apart.quantile(0.9)) < 1e-5
    assert float(apart.max()) < 0.02
    keys = engine._cache.layers[0].keys_SHD
    first, second = ([slot_of(one, n) for n in range(LENGTH)] for one in (TABLE, [7, 0]))
    assert torch.equal(as_bytes(keys[first]), as_bytes(keys[second]))


def test_trees_and_moved_paths(engine: CudaEngine) -> None:
    tree = random_tree(4, prefix_length=255, num_nodes=9, vocab_size=384)
    expected = plain_rows(engine, tree, [1, 2])
    engine.step([Slice([4, 5], 0, tree.prefix, 0)])
    found = engine.step([tree.piece([4, 5], 255, 9, 9)])
    apart = (found - expected).abs().amax(dim=1)
    assert float(apart.median()) < 1e-4
    assert float(apart.max()) < 0.02 * float(expected.abs().max())
    path = tree.path(8)
    engine.move_kv([([4, 5], [(255 + node, 255 + depth) for depth, node in enumerate(path)])])
    ids = [*tree.ids_to(8), 17]
    row = engine.step([Slice([4, 5], len(ids) - 1, [17], 1)])
    chain = engine.step([Slice([1, 2], 0, ids, 1)])
    assert float((row - chain).abs().max()) < 0.02 * float(chain.abs().max())


def test_what_cannot_run_is_refused_by_name(folder: Path, engine: CudaEngine) -> None:
    with pytest.raises(ConfigError, match='kv_cache_dtype "fp8" is for GPUs; on a CPU use "auto"'):
        open_engine(
            folder, weights="float32", threads=1, kv_memory_bytes=None, device="cpu", kv_dtype="fp8"
        )
    page = 2 * 2 * PAGE_SIZE * 2 * 8
    cases: list[tuple[Literal["cpu", "cuda"], int, str]] = [
        ("cpu", 1 << 20, 'use "auto"'),
        ("cuda", 2 * page - 1, rf"blocks of {page} bytes"),
    ]
    for device, given, why in cases:
        with pytest.raises(ConfigError, match=why):
            check_ahead(
                folder,
                device=device,
                weights="float32",
                kv_memory_bytes=given,
                kv_dtype="fp8",
            )
    on_gpu = object.__new__(CudaEngine)
    on_gpu.device, on_gpu._kv_dtype = torch.device("cuda", 0), FLOAT8
    with pytest.raises(ConfigError, match="needs our GPU kernels, which do not run on cuda:0"):
        on_gpu._check_kv()


def float8_layer(*, pages: int, heads: int, head_size: int) -> tuple[LayerPages, LayerPages]:
    """Random pages of float8, and the same numbers in float32."""
    narrow, wide = (
        random_layer(CPU, dtype, pages=pages, heads=heads, head_size=head_size)
        for dtype in (FLOAT8, torch.float32)
    )
    wide.keys_NPHD.copy_(narrow.keys_NPHD)
    wide.values_NPHD.copy_(narrow.values_NPHD)
    return narrow, wide


@INTERPRETED
def test_attention_widens_what_it_reads() -> None:
    """Chains and trees: the bits of attention over pages that hold the same numbers in float32."""
    narrow, wide = float8_layer(pages=3, heads=2, head_size=16)
    queries = draw(5, 4, 16, seed=3)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    ends, used, table = ints(0, 2, 5), ints(270, 600), torch.tensor([[2, 0, 0], [1, 2, 0]]).int()
    pages = (ends, used, table, 0.3)
    found, expected = (attend_pages(queries, one, *pages, causal=True)[0] for one in (narrow, wide))
    assert torch.equal(found, expected)
    ragged = Ragged(ends, used, table, 3, ((2, 270), (3, 600)))
    for attend in (attend_by_reference, attention.attend):
        reference, _ = attend(queries, narrow, ragged, 0.3, causal=True)
        assert torch.allclose(reference, expected, atol=1e-5)
    slots = torch.tensor([[3, 8, 400, 401]] * 5).int()
    own = (ends, ints(64, 128), table, slots, ints(1, 2, 3, 4, 2), 0.3)
    found, expected = (attend_paths(queries, one, *own) for one in (narrow, wide))
    assert torch.equal(found, expected)
    wide.values_SHD[401] += 1
    assert not torch.equal(attend_paths(queries, wide, *own)[3], found[3]), "negative control"


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_stored_with_torchs_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest numbers, and those beyond the largest of float8, among them."""
    round_as_devices_do(monkeypatch)
    heads = (draw(7, 4, 16) * torch.logspace(-4, 4, 7)[:, None, None]).to(dtype)
    cos, sin = torch.ones(7, 16, dtype=dtype), torch.zeros(7, 16, dtype=dtype)
    slots = torch.tensor([9, 300, 4, 0, 17, 255, 256])
    made, expected = (float8_layer(pages=2, heads=1, head_size=16)[0] for _ in range(2))
    rotate_and_store(heads, cos, sin, slots, made.keys_SHD, made.values_SHD)
    expected.store(slots, heads[:, 2:3], heads[:, 3:])
    for name in ("keys_SHD", "values_SHD"):
        assert torch.equal(as_bytes(getattr(made, name)), as_bytes(getattr(expected, name)))
    assert made.values_SHD[256].to(torch.float32).abs().max() == 448
    assert not torch.equal(rounded(heads[2, 3:], FLOAT8).to(dtype), heads[2, 3:])


ROUNDINGS = [
    (48, None, None),
    (904, None, 0.013),
    (904, None, None),
    (640, 128, None),
    (1152, 128, None),
    (1152, None, None),
]


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "block", "scale"), ROUNDINGS)
def test_rows_are_rounded_with_torchs_bits(
    size: int,
    block: int | None,
    scale: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    round_as_devices_do(monkeypatch)
    rows = (draw(6, size) * torch.logspace(-4, 4, 6)[:, None]).to(dtype)
    rows[2] = 0
    rounding = Rounding(block, None if scale is None else torch.tensor(scale))
    steps, scales = round_rows(rows, rounding)
    expected, expected_scales = to_fp8(rows, rounding)
    assert torch.equal(as_bytes(steps), as_bytes(expected))
    assert torch.equal(scales, expected_scales)
    assert scales.stride() == expected_scales.stride()
    alone, _ = round_rows(rows[3:4], rounding)
    assert torch.equal(as_bytes(alone[0]), as_bytes(steps[3]))
    rows[0, 0] *= 1.5
    assert not torch.equal(as_bytes(round_rows(rows, rounding)[0]), as_bytes(steps)), "control"


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "block", "scale"), ROUNDINGS)
def test_norm_and_gate_round_their_rows_with_the_bits_of_two_launches(
    size: int,
    block: int | None,
    scale: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    round_as_devices_do(monkeypatch)
    rounding = Rounding(block, None if scale is None else torch.tensor(scale))
    rows = (draw(5, size) * torch.logspace(-4, 4, 5)[:, None]).to(dtype)
    rows[2] = 0
    delta, weight = draw(5, size, seed=1).to(dtype), draw(size, seed=2).to(dtype)
    both = torch.cat([draw(5, size, seed=3).to(dtype) * 3, rows], dim=1)
    for added in (None, delta):
        sums = [rows.clone() for _ in range(2)]
        normed = add_and_norm(sums[0], added, weight, 1e-6)
        found = add_and_norm(sums[1], added, weight, 1e-6, rounding)
        assert torch.equal(*sums)
        assert isinstance(normed, Tensor)
        assert_same(found, round_rows(normed, rounding))
    gated = gate(both)
    assert isinstance(gated, Tensor)
    assert_same(gate(both, rounding), round_rows(gated, rounding))
    both[0, 0] += 1
    other = gate(both, rounding)
    assert not torch.equal(as_bytes(other[0]), as_bytes(round_rows(gated, rounding)[0])), "control"


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scratch_bytes", [0, 1 << 28])
def test_attention_rounds_its_outputs_by_a_given_scale(
    scratch_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, whose units are folded at once or stored first, and nodes of a tree."""
    round_as_devices_do(monkeypatch)
    layer = random_layer(CPU, dtype, pages=3, heads=2, head_size=16)
    queries, scale = draw(5, 4, 16, seed=3).to(dtype), torch.tensor(0.02)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    ends, table = ints(0, 2, 5), torch.tensor([[2, 0, 0], [1, 2, 0]]).int()
    slots = torch.tensor([[3, 8, 400, 401]] * 5).int()
    chains = (queries, layer, ends, ints(270, 600), table, 0.3)
    trees = (queries, layer, ends, ints(64, 128), table, slots, ints(1, 2, 3, 4, 2), 0.3)

    def outputs(input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        pages, _ = attend_pages(
            *chains, causal=True, scratch_bytes=scratch_bytes, input_scale=input_scale
        )
        paths = attend_paths(*trees, scratch_bytes=scratch_bytes, input_scale=input_scale)
        return pages, paths

    for found, plain in zip(outputs(scale), outputs(None), strict=True):
        expected, _ = to_fp8(plain.flatten(1), Rounding(None, scale))
        assert found.dtype == FLOAT8
        assert torch.equal(as_bytes(found.flatten(1)), as_bytes(expected))
        assert len(expected.to(torch.float32).unique()) > 50


def assert_same(found: Tensor | RoundedRows, expected: RoundedRows) -> None:
    assert isinstance(found, RoundedRows)
    assert torch.equal(as_bytes(found.steps_TN), as_bytes(expected.steps_TN))
    assert torch.equal(found.scales, expected.scales)
    assert found.scales.stride() == expected.scales.stride()


@pytest.mark.parametrize("num_rows", [1, FIXED_ROWS, 150])
def test_a_product_takes_rounded_rows_in_its_own_numbers_of_rows(num_rows: int) -> None:
    """With the bits of the same rows, not yet rounded."""
    weight = Fp8Weight(draw(32, 48).to(FLOAT8), draw(32, 1, seed=1).abs())
    linear = FixedRowsLinear(Fp8Linear(weight, None, torch.bfloat16), (FIXED_ROWS, 2 * FIXED_ROWS))
    rows = draw(num_rows, 48, seed=2).to(torch.bfloat16)
    assert torch.equal(linear(to_fp8(rows, Rounding())), linear(rows))


@pytest.mark.parametrize("num_rows", [64, 150])
def test_tiles_of_blocked_rows_have_the_layout_of_products(num_rows: int) -> None:
    rounded_rows = to_fp8(draw(num_rows, 256), Rounding(128))
    sizes = (64,) if num_rows == 64 else (128, 64)
    tiles = rounded_rows.tiles(sizes)
    for tile, size in zip(tiles, sizes, strict=True):
        assert tile.scales.stride() == (1, size)
        assert tile.steps_TN.shape == (size, 256)
    joined = torch.cat([tile.scales for tile in tiles])[:num_rows]
    assert torch.equal(joined, rounded_rows.scales)


@pytest.mark.release
@INTERPRETED
def test_the_check_of_kernels_covers_float8(
    monkeypatch: pytest.MonkeyPatch, products_row_by_row: None
) -> None:
    round_as_devices_do(monkeypatch)
    sizes = ModelSizes(2, 1, 16, 32, 50, torch.float32, FLOAT8, rounds_rows=True)
    assert find_fault(CPU, sizes) is None
    monkeypatch.setattr(
        "workers.engine.cuda.kernel_check.round_rows",
        lambda rows, rounding: round_rows(rows.flip(1), rounding),
    )
    assert find_fault(CPU, sizes) == "a row in float8 has other bits"


@pytest.mark.release
@INTERPRETED
@pytest.mark.usefixtures("products_row_by_row")
def test_trees_keep_their_bits_with_our_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder, "cpu", batch_invariant=True, kv_dtype="fp8")
    for name in ("can_use_kernel", "can_run_kernels"):
        monkeypatch.setattr(attention, name, lambda *_: True)
    with torch.inference_mode():
        assert trees_are_invariant(engine)


@pytest.mark.release
def test_they_compile_for_an_h100(tmp_path: Path) -> None:
    """Without spills; attention has its products on tensor cores, in bfloat16."""
    found = compile_launches(launch_float8, tmp_path)
    numbers = {name: len(variants) for name, variants in found.items()}
    assert numbers == {
        "attend_kernel": 6,
        "fold_stored_kernel": 3,
        "attend_paths_kernel": 2,
        "_rotate_and_store": 1,
        "_round_rows": 3,
        "_add_and_norm": 8,
        "_gate": 3,
    }
    variants = [one for ones in found.values() for one in ones]
    assert not any(one.fused or one.spills for one in variants), found
    assert all(one.products for one in (*found["attend_kernel"], *found["attend_paths_kernel"]))
    # A row is added up in one order, whether its norm is rounded or not.
    sums = [one.row_sum for one in found["_add_and_norm"]]
    assert len(set(sums)) == len(("4096", "8192")), sums
    rounding = ("_round_rows", "_add_and_norm", "_gate")
    assert all(one.wide_loads for name in rounding for one in found[name]), found
