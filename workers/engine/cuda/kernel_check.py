"""The check of our kernels at start-up: do they agree with torch on this device?

It runs each kernel once or twice with the sizes of the model at hand, on random numbers. What it
finds decides whether our kernels run (process/kernels.py). Import it only where kernels can run.

Shapes: T tokens, A query heads, H key/value heads, D head size, N features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.cuda.attention import Ragged, attend_by_reference
from workers.engine.cuda.attention_kernel import SCRATCH_BYTES, attend_pages
from workers.engine.cuda.float8_kernels import round_rows
from workers.engine.cuda.kv_cache import (
    FLOAT8,
    KEY_BLOCK,
    LARGEST_FLOAT8,
    PAGE_SIZE,
    CudaKvCache,
    LayerPages,
    rounded,
    slot_of,
)
from workers.engine.cuda.layer_kernels import add_and_norm, gate, rotate_and_store
from workers.engine.cuda.linears import RoundedRows, Rounding, to_fp8
from workers.engine.cuda.tree_kernel import attend_paths
from workers.engine.load.stored_tensors import FP8_BLOCK
from workers.verification.choice_kernels import choose_by_kernels
from workers.verification.device_choice import Row, choose_by_torch, pack_rows

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.004, torch.bfloat16: 0.03, FLOAT8: 0.07}
"""Largest difference allowed, as a share of the largest expected value: a few roundings."""
_TABLE = (3, 0, 2)
_CHAINS = ((1, 300), (9, 2 * PAGE_SIZE), (70, 600))
"""(queries, keys)"""
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=50),
)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model, or of a rank's part. `kv_dtype`: that of its pages. `with_attention`:
    its attention runs in kernels (attention.can_use_kernel). `rounds_rows`: rows of products are
    rounded to float8.
    """

    num_queries: int
    num_keys: int
    head_size: int
    hidden: int
    vocab_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    with_attention: bool = True
    rounds_rows: bool = False


def find_fault(device: torch.device, sizes: ModelSizes) -> str | None:
    """The first kernel that does not agree with torch, and by how much; None if all agree."""
    checks = [_layers(device, sizes), _choices(device, sizes)]
    if sizes.with_attention:
        checks.append(_attention(device, sizes))
    if sizes.rounds_rows:
        checks.append(_rounding(device, sizes))
    return next((fault for check in checks for fault in check if fault is not None), None)


def _apart(
    name: str, found: Tensor, expected: Tensor, rounded_to: torch.dtype | None = None
) -> str | None:
    bound = _TOLERANCE[rounded_to or found.dtype] * float(expected.abs().max())
    largest = float((found.to(torch.float32) - expected.to(torch.float32)).abs().max())
    # Not a number is not within the bound.
    return None if largest <= bound else f"{name} differs by {largest:.2g}, allowed are {bound:.2g}"


def _other_bits(name: str, found: Tensor, expected: Tensor) -> str | None:
    # torch compares no float8.
    same = torch.equal(found.to(torch.float32), expected.to(torch.float32))
    return None if same else f"{name} has other bits"


def _random(*shape: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(like)


def _layers(device: torch.device, sizes: ModelSizes) -> Iterator[str | None]:
    like = torch.empty(0, dtype=sizes.dtype, device=device)
    hidden_TN, delta_TN = _random(3, sizes.hidden, like=like), _random(3, sizes.hidden, like=like)
    weight_N = _random(sizes.hidden, like=like)
    sum_TN = (hidden_TN + delta_TN).to(torch.float32)
    norm_TN = sum_TN * (sum_TN.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight_N
    normed = add_and_norm(hidden_TN, delta_TN, weight_N, 1e-5)
    assert isinstance(normed, Tensor)
    yield _apart("add_and_norm", normed, norm_TN)
    both = _random(3, 2 * sizes.hidden, like=like)
    gates, ups = both.to(torch.float32).chunk(2, dim=1)
    gated = gate(both)
    assert isinstance(gated, Tensor)
    yield _apart("gate", gated, nn.functional.silu(gates) * ups)

    queries, keys, size = sizes.num_queries, sizes.num_keys, sizes.head_size
    heads_TAD = _random(3, queries + 2 * keys, size, like=like)
    angles = _random(3, size // 2, like=like)
    cos_TD, sin_TD = (torch.cat([one, one], dim=1) for one in (angles.cos(), angles.sin()))
    layer = _pages(device, sizes)
    slots_T = torch.tensor([9, 300, 4], device=device)
    found = rotate_and_store(
        *(heads_TAD, cos_TD, sin_TD, slots_T, layer.keys_SHD, layer.values_SHD),
        scales_2H=layer.scales_2H,
    )
    first, second = heads_TAD.chunk(2, dim=2)
    turned_TAD = heads_TAD * cos_TD[:, None] + torch.cat([-second, first], 2) * sin_TD[:, None]
    yield _apart("rotate_and_store", found, turned_TAD[:, :queries])
    stored_THD = layer.keys_SHD.index_select(0, slots_T)
    expected_THD = rounded(turned_TAD[:, queries:][:, :keys], sizes.kv_dtype, layer.scales[0])
    yield _apart("a stored key", stored_THD, expected_THD.to(torch.float32))
    stored_THD = layer.values_SHD.index_select(0, slots_T)
    expected_THD = rounded(heads_TAD[:, queries + keys :], sizes.kv_dtype, layer.scales[1])
    yield _other_bits("a stored value", stored_THD, expected_THD)


def _pages(device: torch.device, sizes: ModelSizes) -> LayerPages:
    scales = _random(1, 2, sizes.num_keys, like=torch.empty(0, device=device)).abs() + 0.5
    cache = CudaKvCache(
        num_layers=1,
        num_heads=sizes.num_keys,
        head_size=sizes.head_size,
        num_blocks=max(_TABLE) + 1,
        dtype=sizes.kv_dtype,
        device=device,
        scales_L2H=scales if sizes.kv_dtype == FLOAT8 else None,
    )
    layer = cache.layers[0]
    like = torch.empty(0, device=device)
    for number, one in enumerate((layer.keys_NPHD, layer.values_NPHD)):
        one.copy_(_random(*one.shape, like=like).roll(number, 1))
    return layer


def _attention(device: torch.device, sizes: ModelSizes) -> Iterator[str | None]:
    """Chains against the reference, a row alone, and a chain that is laid out as a tree."""
    layer, scaling = _pages(device, sizes), sizes.head_size**-0.5
    widths, used = zip(*_CHAINS, strict=True)
    like = torch.empty(0, dtype=sizes.dtype, device=device)
    queries = _random(sum(widths), sizes.num_queries, sizes.head_size, like=like)

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ends = ints([sum(widths[:number]) for number in range(len(widths) + 1)])
    ragged = Ragged(ends, ints(used), ints([_TABLE] * len(used)), max(widths), _CHAINS)
    expected_TAD, _ = attend_by_reference(queries, layer, ragged, scaling, causal=True)
    pages = (ragged.cu_seq_B, ragged.used_B, ragged.table_BP)
    outputs = [
        attend_pages(queries, layer, *pages, scaling, causal=True, scratch_bytes=scratch)[0]
        for scratch in (0, SCRATCH_BYTES)
    ]
    yield _apart("attention", outputs[0], expected_TAD)
    yield _other_bits("attention with stored units", outputs[1], outputs[0])
    window, keys = _CHAINS[-1]
    table = ints([_TABLE])
    alone, _ = attend_pages(
        queries[-window:][:1],
        layer,
        ints([0, 1]),
        ints([keys - window + 1]),
        table,
        scaling,
        causal=True,
    )
    yield _other_bits("a row of attention alone", alone, outputs[0][-window:][:1])

    shared = (keys - window) // KEY_BLOCK * KEY_BLOCK
    slots = [slot_of(_TABLE, position) for position in range(shared, keys)]
    nodes = attend_paths(
        queries[-window:],
        layer,
        ints([0, window]),
        ints([shared]),
        table,
        ints([slots] * window),
        torch.arange(keys - window + 1 - shared, keys + 1 - shared, device=device).to(torch.int32),
        scaling,
    )
    yield _other_bits("attention of a tree", nodes, outputs[0][-window:])


def _rounding(device: torch.device, sizes: ModelSizes) -> Iterator[str | None]:
    """Rows in float8: by a kernel of their own, and as the last act of the norm and of the gate."""
    like = torch.empty(0, dtype=sizes.dtype, device=device)
    rows_TN, weight_N = _random(3, sizes.hidden, like=like), _random(sizes.hidden, like=like)
    both = _random(3, 2 * sizes.hidden, like=like)
    for rounding in (
        Rounding(),
        Rounding(FP8_BLOCK),
        Rounding(None, like.new_tensor(0.02).float()),
    ):
        if sizes.hidden % (rounding.block or 1):
            continue
        yield from _same_rows("", round_rows(rows_TN, rounding), to_fp8(rows_TN, rounding))
        normed, rounded_norm = (
            add_and_norm(rows_TN.clone(), None, weight_N, 1e-5, one) for one in (None, rounding)
        )
        assert isinstance(normed, Tensor)
        assert isinstance(rounded_norm, RoundedRows)
        steps_TN, scales = rounded_norm
        wide_TN = steps_TN.float() * scales.repeat_interleave(sizes.hidden // scales.shape[1], 1)
        expected_TN = normed.float()
        if rounding.input_scale is not None:
            largest = LARGEST_FLOAT8 * float(rounding.input_scale)
            expected_TN = expected_TN.clamp(-largest, largest)
        yield _apart("a row in float8 after a norm", wide_TN, expected_TN, FLOAT8)
        gated = gate(both)
        assert isinstance(gated, Tensor)
        yield from _same_rows(" after a gate", gate(both, rounding), to_fp8(gated, rounding))


def _same_rows(
    name: str, found: Tensor | RoundedRows, expected: RoundedRows
) -> Iterator[str | None]:
    yield _other_bits(f"a row in float8{name}", found[0], expected[0])
    yield _other_bits(f"the scale of a row in float8{name}", found[1], expected[1])


def _choices(device: torch.device, sizes: ModelSizes) -> Iterator[str | None]:
    logits = _random(6, sizes.vocab_size, like=torch.empty(0, device=device)) * 4
    for chosen in ([*_SAMPLINGS, *_SAMPLINGS], [_SAMPLINGS[1]] * 6, [_SAMPLINGS[0]] * 6):
        rows = [
            Row(SequenceSpec(sampling, seed=7, prompt_length=1), [0] * (number + 1))
            for number, sampling in enumerate(chosen)
        ]
        params = pack_rows(rows, vocab_size=sizes.vocab_size, device=device)
        for found, expected in zip(
            choose_by_kernels(logits, params), choose_by_torch(logits, params), strict=True
        ):
            yield None if torch.equal(found, expected) else "the choice of tokens differs"
