"""The kernels between a layer's products give what torch's operations give, row by row."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import SiLUActivation

from tests.tiny import Architecture, make_tiny_checkpoint
from tests.workers.compiling import compile_launches
from tests.workers.engine.cuda.engines import DEVICES, make_engine
from tests.workers.engine.cuda.launches import launch_layers, launch_layers_of_other_models
from tests.workers.engine.cuda.rounding import round_as_devices_do
from tests.workers.engine.trees import random_tree
from workers.engine.cuda import engine as engine_module
from workers.engine.cuda import layer_kernels
from workers.engine.cuda.kv_cache import PAGE_SIZE, CudaKvCache
from workers.engine.cuda.layer_kernels import HeadNorms, KernelOperations
from workers.engine.cuda.linears import RoundedRows
from workers.engine.cuda.step import DeviceStep, Heads, exact_shape, lay_out, read_inputs
from workers.engine.forward import AttentionLayer, LayerOperations, LeanForward
from workers.engine.modules import NativeNorm
from workers.engine.slices import Slice

pytestmark = pytest.mark.release

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-7}
"""Relative tolerances: one unit of the last place in bfloat16, some in float32.

A device's exponential and reciprocal root are off by a few units.
"""
EPSILON = 1e-5


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter, which a CPU needs, is for machines without a GPU")
    round_as_devices_do(monkeypatch)
    return str(request.param)


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    result: torch.dtype = request.param
    return result


def draw(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def near(result: Tensor, expected: Tensor) -> bool:
    """Whether all values are within a rounding; in bfloat16, nearly all must be equal."""
    bound = ROUNDING[expected.dtype] * expected.double().abs() + 1e-30
    all_near = bool(((result.double() - expected.double()).abs() <= bound).all())
    return all_near and (
        result.dtype == torch.float32 or float((result != expected).double().mean()) < 0.01
    )


@pytest.mark.parametrize("size", [8, 48, 96, 1000, 4096, 5120, 8192, 16384])
def test_sums_are_torchs_and_norms_within_a_rounding(
    size: int, device: str, dtype: torch.dtype
) -> None:
    hidden, delta = (draw(5, size, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    hidden[3] = 0.0
    norm = NativeNorm(draw(size, device=device, dtype=dtype, seed=3), EPSILON)
    kernels, plain = (one().add_and_norm(norm) for one in (KernelOperations, LayerOperations))
    for added in (None, delta):
        mine, theirs = hidden.clone(), hidden.clone()
        result, expected = kernels(mine, added), plain(theirs, added)
        assert torch.equal(mine, theirs)
        assert near(result, expected)
    sums = hidden.double() + delta.double()
    exact = sums * torch.rsqrt(sums.square().mean(1, keepdim=True) + EPSILON)
    assert torch.allclose(
        result.double(), exact * norm.weight.double(), rtol=0, atol=8 * ROUNDING[dtype]
    )


@pytest.mark.parametrize("size", [8, 112, 1024, 1368, 14336])
def test_gates_are_torchs_within_a_rounding(size: int, device: str, dtype: torch.dtype) -> None:
    both = draw(5, 2 * size, device=device, dtype=dtype) * 4
    both[2, :size] = -20.0
    kernels, plain = (one().gate(SiLUActivation()) for one in (KernelOperations, LayerOperations))
    result, expected = kernels(both.clone()), plain(both.clone())
    assert result.shape == (5, size)
    assert near(result, expected)


def make_step(
    slices: list[Slice], layer: AttentionLayer, device: str, dtype: torch.dtype
) -> tuple[DeviceStep, CudaKvCache]:
    """A step over its own pages."""
    cache = CudaKvCache(
        num_layers=2,
        num_heads=layer.num_keys,
        head_size=layer.head_size,
        num_blocks=4,
        dtype=dtype,
        device=torch.device(device),
    )
    layout = lay_out(slices, exact_shape(slices), table_pages=2, scratch_block=cache.scratch_block)
    inputs = read_inputs(torch.from_numpy(layout.array).to(device), layout, table_pages=2)
    heads = Heads(layer.num_queries, layer.num_keys)
    return DeviceStep(inputs, torch.arange(1, device=device), cache, heads), cache


def rotary_factors(num_tokens: int, head_size: int, device: str, dtype: torch.dtype) -> Any:
    angles = draw(num_tokens, head_size // 2, device=device, dtype=torch.float32, seed=9) * 10
    twice = torch.cat([angles, angles], dim=1)
    return twice.cos().to(dtype), twice.sin().to(dtype)


SLICES = [Slice([2, 0], 250, [1] * 9, 0), Slice([1], 0, [1], 1), Slice([3], 4, [1, 1], 0)]


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "head_size"),
    [(6, 2, 8), (1, 1, 2), (14, 2, 64), (9, 3, 80), (32, 8, 128), (2, 1, 256)],
)
def test_keys_values_and_outputs_have_torchs_bits(
    num_queries: int, num_keys: int, head_size: int, device: str, dtype: torch.dtype
) -> None:
    """They write into pages that are not neighbors, and nowhere else."""
    layer = AttentionLayer(1, num_queries, num_keys, head_size, scaling=0.3)
    rows = draw(12, layer.num_heads * head_size, device=device, dtype=dtype)
    cos, sin = rotary_factors(12, head_size, device, dtype)
    stored, attended = [], []
    for operations in (KernelOperations(), LayerOperations()):
        step, cache = make_step(SLICES, layer, device, dtype)
        rotation = operations.rotation(cos, sin, layer)
        attended.append(operations.attend(layer)(rows.clone(), rotation, step))
        stored.append(torch.stack([cache.layers[1].keys_SHD, cache.layers[1].values_SHD]))
        assert not cache.layers[0].keys_SHD.any()
    assert torch.equal(*stored)
    assert int(stored[1].any(-1).sum()) == 12 * 2 * num_keys
    # If products compute attention, the memory layout of the queries may select them.
    bound = ROUNDING[dtype] * float(attended[1].abs().max())
    assert float((attended[0] - attended[1]).abs().max()) <= (0.0 if device == "cpu" else bound)


def test_bits_tell_where_it_is_rounded(device: str) -> None:
    """Negative control of the test above: a single rounding gives other bits."""
    layer = AttentionLayer(1, 2, 1, 64, scaling=0.3)
    rows = draw(12, 4 * 64, device=device, dtype=torch.bfloat16)
    cos, sin = rotary_factors(12, 64, device, torch.bfloat16)
    step, cache = make_step(SLICES, layer, device, torch.bfloat16)
    KernelOperations().attend(layer)(rows, (cos, sin), step)
    keys = rows.view(12, 4, 64)[:, 2].float()
    swapped = torch.cat([-keys[:, 32:], keys[:, :32]], dim=1)
    once = (keys * cos.float() + swapped * sin.float()).to(torch.bfloat16)
    stored = cache.layers[1].keys_SHD[step.slots_T, 0]
    assert 0 < int((stored != once).sum()) < stored.numel() // 2
    assert torch.allclose(stored.float(), once.float(), rtol=0, atol=0.05)


@pytest.mark.parametrize("native", [True, False])
def test_norms_of_heads(native: bool, device: str, dtype: torch.dtype) -> None:
    """Norms in the kernel, and norms by other modules before it."""
    kinds = [NativeNorm(1 + draw(64, device=device, dtype=dtype, seed=s), EPSILON) for s in (5, 6)]
    norms = tuple(kinds) if native else tuple(torch.nn.Sequential(norm) for norm in kinds)
    layer = AttentionLayer(1, 6, 2, 64, scaling=0.3, head_norms=norms)
    rows = draw(12, 10 * 64, device=device, dtype=dtype)
    cos, sin = rotary_factors(12, 64, device, dtype)
    stored = []
    for operations in (KernelOperations(), LayerOperations()):
        step, cache = make_step(SLICES, layer, device, dtype)
        operations.attend(layer)(rows.clone(), operations.rotation(cos, sin, layer), step)
        pages = cache.layers[1]
        stored.append((pages.keys_SHD[step.slots_T], pages.values_SHD[step.slots_T]))
    (mine, values), (theirs, expected) = stored
    assert torch.equal(values, expected)
    # One unit of the norm's rounding, rotated; relative to the largest, as a sum can be near zero.
    bound = 2 * ROUNDING[dtype] * float(theirs.abs().max())
    assert float((mine - theirs).abs().max()) <= (bound if native else 0.0)
    assert dtype == torch.float32 or float((mine != theirs).double().mean()) < 0.01


def rotate(rows: Tensor, norms: HeadNorms | None) -> Tensor:
    """Queries, keys and values after the kernel, token by token."""
    num_tokens = rows.shape[0]
    factors = draw(64, 64, device=str(rows.device), dtype=rows.dtype, seed=4)
    keys, values = (rows.new_zeros(PAGE_SIZE, 2, 64) for _ in range(2))
    slots = torch.arange(num_tokens, device=rows.device) + 3
    queries = layer_kernels.rotate_and_store(
        rows.view(num_tokens, 9, 64), factors[:num_tokens], factors[:num_tokens], slots, keys,
        values, norms,
    )  # fmt: skip
    return torch.cat([queries, keys[slots], values[slots]], dim=1)


def test_a_row_does_not_depend_on_how_many_there_are(device: str, dtype: torch.dtype) -> None:
    weight = draw(64, device=device, dtype=dtype, seed=1)
    wide = draw(9 * 64, device=device, dtype=dtype, seed=2)
    norms = HeadNorms(weight, weight, EPSILON, EPSILON)
    operations: list[Callable[[Tensor], Tensor | RoundedRows]] = [
        lambda rows: layer_kernels.add_and_norm(rows.clone(), None, wide, EPSILON),
        lambda rows: layer_kernels.add_and_norm(rows.clone(), rows, wide, EPSILON),
        lambda rows: rotate(rows, None),
        lambda rows: rotate(rows, norms),
        layer_kernels.gate,
    ]

    def result(operation: Callable[[Tensor], Tensor | RoundedRows], rows: Tensor) -> Tensor:
        found = operation(rows)
        assert isinstance(found, Tensor)
        return found

    rows = draw(64, 9 * 64, device=device, dtype=dtype, seed=3)
    for operation in operations:
        run = partial(result, operation)
        whole = run(rows)
        for count in (1, 3):
            assert torch.equal(run(rows[:count]), whole[:count])
        changed = rows[:2].clone()
        changed[1] = 7.0
        assert torch.equal(run(changed)[:1], whole[:1])
        changed[0, 5] += 1.0
        assert not torch.equal(run(changed)[:1], whole[:1])


def test_padding_may_share_a_slot(device: str) -> None:
    """The slot holds one of the tokens' keys and values, and no other slot changes."""
    rows = draw(12, 4, 16, device=device, dtype=torch.float32)
    still, keys, values = rows.new_zeros(12, 16), rows.new_zeros(8, 1, 16), rows.new_zeros(8, 1, 16)
    slots = torch.tensor([1] + [5] * 11, device=device)
    queries = layer_kernels.rotate_and_store(rows, still + 1, still, slots, keys, values)
    assert torch.equal(queries, rows[:, :2])
    assert torch.equal(keys[1], rows[0, 2:3])
    for stored, given in ((keys[5, 0], rows[1:, 2]), (values[5, 0], rows[1:, 3])):
        assert bool(torch.isin(stored, given).all())
    assert not keys[[0, 2, 3, 4, 6, 7]].any()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_model_with_kernels_gives_the_logits_of_one_without(
    architecture: Architecture,
    device: str,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompt, window and tree; and the probe accepts them."""
    folder = make_tiny_checkpoint(tmp_path, architecture=architecture)
    tree = random_tree(1, prefix_length=7, num_nodes=6, vocab_size=384)
    rows: list[Tensor] = []
    for can in (True, False):
        monkeypatch.setattr(engine_module, "can_run_kernels", lambda _, can=can: can)
        # On a CPU, the self-test would take long and say nothing about a GPU.
        engine = make_engine(
            folder,
            device,
            dtype=dtype,
            batch_invariant=device == "cuda",
            graphs=architecture == "qwen3",
        )
        prompt = engine.step([Slice([1], 0, list(range(3, 12)), 2), Slice([3], 0, tree.prefix, 0)])
        window = engine.step([Slice([1], 9, [5, 6, 7], 3), Slice([2], 0, [9], 1)])
        nodes = engine.step([tree.piece([3], 6, 6, 7)])
        rows.append(torch.cat([prompt, window, nodes]))
        assert isinstance(engine._forward, LeanForward)
        assert isinstance(engine._forward._operations, KernelOperations) is can
        if device == "cuda" and dtype == torch.bfloat16:
            assert engine.batch_invariant
    bound = 1e-5 if dtype == torch.float32 else 0.03
    assert float((rows[0] - rows[1]).abs().max()) <= bound * float(rows[1].abs().max())


def test_all_compile_for_an_h100(tmp_path: Path) -> None:
    """Kernels of an 8 B Llama load 16 bytes at once."""
    found = compile_launches(launch_layers, tmp_path)
    numbers = {name: len(variants) for name, variants in found.items()}
    assert numbers == {"_add_and_norm": 2, "_rotate_and_store": 2, "_gate": 1}
    for variants in found.values():
        assert all(one.wide_loads and not one.spills for one in variants), found


def test_those_of_other_models_compile(tmp_path: Path) -> None:
    """Five kernels of each model."""
    found = compile_launches(launch_layers_of_other_models, tmp_path)
    assert sum(map(len, found.values())) == 15
