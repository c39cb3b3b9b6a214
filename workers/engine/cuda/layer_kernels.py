"""Triton kernels for the operations between the matrix products of a layer.

Each kernel replaces several of torch's operations. `KernelOperations` gives them to the lean
forward (forward.py). Where there is no kernel for a module of the model, torch's operation stays.

Each kernel rounds to the model's dtype wherever torch's operations do. So the results equal
torch's, except that sums of squares have another order, and that reciprocal roots and exponentials
may differ in the last bit. Every size but the number of rows is a constant of the compiled kernel,
and the number of rows only determines the number of programs. So a row's bits depend on that row
only.

Import it only where kernels can run. Shapes: T rows (tokens), N features, F features of the
feed-forward, A heads of a token (queries, keys, values), Q query heads, D head size, H key/value
heads, S slots. Outputs are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from workers.engine.cuda.kv_cache import FLOAT8, LARGEST_FLOAT8
from workers.engine.cuda.linears import SMALLEST_SCALE, to_fp8
from workers.engine.cuda.step import DeviceStep
from workers.engine.forward import (
    AddAndNorm,
    Attend,
    AttentionLayer,
    Gate,
    LayerOperations,
    Rotation,
    Step,
    norm_heads,
)
from workers.engine.modules import NativeNorm
from workers.engine.parallel.group import RankGroup
from workers.process.kernels import on_device

LARGEST_ROW = 32768
"""Maximum features of a row in add_and_norm, which keeps a row in one program's registers."""
_MOST_WARPS = 16
_ELEMENTS_OF_A_WARP = 256
"""One load of 16 bytes per thread, for a type of 2 bytes."""
_HEADS_OF_A_PROGRAM = 8
_GATES_OF_A_PROGRAM = 1024
_ROUNDED_OF_A_PROGRAM = 1024
"""If a row has several scales."""
_LARGEST, _INVERSE = tl.constexpr(LARGEST_FLOAT8), tl.constexpr(1 / LARGEST_FLOAT8)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The weights [D] of the norms of queries and keys, and their epsilons."""

    query_weight_D: Tensor
    key_weight_D: Tensor
    query_epsilon: float
    key_epsilon: float


def add_and_norm(
    hidden_TN: Tensor, delta_TN: Tensor | None, weight_N: Tensor, epsilon: float
) -> Tensor:
    """Add `delta_TN` to `hidden_TN` in place; return the sum's RMS norm, times the weight.

    The sum is rounded once, and the norm of the rounded sum once more. N is at most LARGEST_ROW;
    all tensors have one dtype.
    """
    num_rows, size = hidden_TN.shape
    assert size <= LARGEST_ROW, size
    assert hidden_TN.is_contiguous()
    assert weight_N.shape == (size,)
    assert delta_TN is None or delta_TN.shape == hidden_TN.shape
    normed_TN = torch.empty_like(hidden_TN)
    block = triton.next_power_of_2(size)
    with on_device(hidden_TN.device):
        _add_and_norm[(num_rows,)](
            hidden_TN,
            hidden_TN if delta_TN is None else delta_TN.contiguous(),
            weight_N,
            normed_TN,
            epsilon,
            SIZE=size,
            BLOCK=block,
            HAS_DELTA=delta_TN is not None,
            num_warps=_warps_of(block),
        )
    return normed_TN


def rotate_and_store(
    heads_TAD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    slots_T: Tensor,
    keys_SHD: Tensor,
    values_SHD: Tensor,
    norms: HeadNorms | None = None,
    scales_2H: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys, store keys and values in their slots, return the queries [T, Q, D].

    With `norms`, queries and keys are first normed head by head. Slots may be float8, then with
    scales or without (kv_cache.rounded). `slots_T` is int64. If several tokens have one slot, it
    holds the keys and values of any of them.
    """
    num_tokens, num_heads, head_size = heads_TAD.shape
    num_keys = keys_SHD.shape[1]
    num_queries = num_heads - 2 * num_keys
    assert num_queries > 0
    assert head_size % 2 == 0
    assert cos_TD.shape == sin_TD.shape == (num_tokens, head_size)
    assert slots_T.shape == (num_tokens,)
    assert slots_T.dtype == torch.int64
    assert keys_SHD.shape == values_SHD.shape
    assert keys_SHD.shape[2] == head_size
    assert keys_SHD.is_contiguous()
    assert values_SHD.is_contiguous()
    queries_TQD = heads_TAD.new_empty((num_tokens, num_queries, head_size))
    half_block = triton.next_power_of_2(head_size // 2)
    with on_device(heads_TAD.device):
        _rotate_and_store[(num_tokens, triton.cdiv(num_heads, _HEADS_OF_A_PROGRAM))](
            heads_TAD.contiguous(),
            cos_TD.contiguous(),
            sin_TD.contiguous(),
            slots_T,
            queries_TQD,
            keys_SHD,
            values_SHD,
            cos_TD if scales_2H is None else scales_2H,
            heads_TAD if norms is None else norms.query_weight_D,
            heads_TAD if norms is None else norms.key_weight_D,
            0.0 if norms is None else norms.query_epsilon,
            0.0 if norms is None else norms.key_epsilon,
            NUM_QUERIES=num_queries,
            NUM_KEYS=num_keys,
            HALF=head_size // 2,
            HALF_BLOCK=half_block,
            HEADS=_HEADS_OF_A_PROGRAM,
            HAS_NORMS=norms is not None,
            HAS_SCALES=scales_2H is not None,
            num_warps=_warps_of(_HEADS_OF_A_PROGRAM * half_block),
            # A product and a sum in one rounding would differ from torch in float32.
            enable_fp_fusion=False,
        )
    return queries_TQD


def gate(gate_and_up: Tensor) -> Tensor:
    """SiLU of the gates times the ups: [T, 2 x F] in, gates first; [T, F] out."""
    num_rows, both = gate_and_up.shape
    assert both % 2 == 0
    size = both // 2
    gated_TF = gate_and_up.new_empty((num_rows, size))
    block = min(_GATES_OF_A_PROGRAM, triton.next_power_of_2(size))
    with on_device(gate_and_up.device):
        _gate[(num_rows, triton.cdiv(size, block))](
            gate_and_up.contiguous(), gated_TF, SIZE=size, BLOCK=block, num_warps=_warps_of(block)
        )
    return gated_TF


def round_rows(
    rows_TN: Tensor, block: int | None, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As linears.to_fp8, with the same bits."""
    num_rows, size = rows_TN.shape
    width = block or size
    if width > LARGEST_ROW:
        return to_fp8(rows_TN, block, input_scale)
    num_groups = size // width
    steps_TN = torch.empty(rows_TN.shape, dtype=FLOAT8, device=rows_TN.device)
    scales_GT = rows_TN.new_empty((num_groups, num_rows), dtype=torch.float32)
    padded = triton.next_power_of_2(width)
    groups = min(triton.next_power_of_2(num_groups), max(1, _ROUNDED_OF_A_PROGRAM // padded))
    with on_device(rows_TN.device):
        _round_rows[(num_rows, triton.cdiv(num_groups, groups))](
            rows_TN.contiguous(),
            steps_TN,
            scales_GT,
            scales_GT if input_scale is None else input_scale,
            num_rows,
            NUM_GROUPS=num_groups,
            GROUPS=groups,
            WIDTH=width,
            BLOCK=padded,
            HAS_SCALE=input_scale is not None,
            num_warps=_warps_of(groups * padded),
        )
    return steps_TN, scales_GT.view(num_rows, 1) if block is None else scales_GT.t()


def _warps_of(elements: int) -> int:
    return max(1, min(_MOST_WARPS, elements // _ELEMENTS_OF_A_WARP))


@triton.jit
def _add_and_norm(
    hidden,
    delta,
    weight,
    normed,
    epsilon,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """Processes one row."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    places = tl.arange(0, BLOCK)
    inside = places < SIZE
    values = tl.load(hidden + row + places, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + row + places, mask=inside, other=0.0).to(tl.float32)
        rounded = (values + added).to(hidden.dtype.element_ty)
        tl.store(hidden + row + places, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + epsilon)
    result = (values * scale * factors).to(normed.dtype.element_ty)
    tl.store(normed + row + places, result, mask=inside)


@triton.jit
def _rotate_and_store(
    heads,
    cos,
    sin,
    slots,
    queries,
    keys,
    values,
    scales,
    query_weight,
    key_weight,
    query_epsilon,
    key_epsilon,
    NUM_QUERIES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Processes a few heads of one token, each as its first and its second half."""
    NUM_ROTATED: tl.constexpr = NUM_QUERIES + NUM_KEYS
    NUM_HEADS: tl.constexpr = NUM_ROTATED + NUM_KEYS
    DTYPE: tl.constexpr = heads.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    place = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < NUM_HEADS) & (place < HALF)
    slot = tl.load(slots + token)
    own = heads + token * (NUM_HEADS * 2 * HALF) + head * (2 * HALF) + place
    first = tl.load(own, mask=inside, other=0.0)
    second = tl.load(own + HALF, mask=inside, other=0.0)
    turn = token * (2 * HALF) + place
    # Loaded once per head, so that the values are distributed over threads as those of the heads.
    first_cos = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + turn + HALF, mask=inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + turn + HALF, mask=inside, other=0.0).to(tl.float32)
    left, right = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORMS:
        is_query = head < NUM_QUERIES
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        epsilon = tl.where(is_query, query_epsilon, key_epsilon)
        scale = tl.rsqrt(squares[:, None] / (2 * HALF) + epsilon)
        query_left = tl.load(query_weight + place, mask=inside, other=0.0).to(tl.float32)
        query_right = tl.load(query_weight + place + HALF, mask=inside, other=0.0).to(tl.float32)
        key_left = tl.load(key_weight + place, mask=inside, other=0.0).to(tl.float32)
        key_right = tl.load(key_weight + place + HALF, mask=inside, other=0.0).to(tl.float32)
        left = left * scale * tl.where(is_query, query_left, key_left)
        right = right * scale * tl.where(is_query, query_right, key_right)
        left = left.to(DTYPE).to(tl.float32)
        right = right.to(DTYPE).to(tl.float32)
    # Rounded after each operation, as in torch.
    kept = (left * first_cos).to(DTYPE).to(tl.float32)
    crossed = (right * -first_sin).to(DTYPE).to(tl.float32)
    turned_left = (kept + crossed).to(DTYPE)
    kept = (right * second_cos).to(DTYPE).to(tl.float32)
    crossed = (left * second_sin).to(DTYPE).to(tl.float32)
    turned_right = (kept + crossed).to(DTYPE)

    scale = tl.full((HEADS, 1), 1.0, tl.float32)
    if HAS_SCALES:
        is_stored = (head >= NUM_QUERIES) & (head < NUM_HEADS)
        scale = tl.load(scales + head - NUM_QUERIES, mask=is_stored, other=1.0)
    query_at = queries + token * (NUM_QUERIES * 2 * HALF) + head * (2 * HALF) + place
    tl.store(query_at, turned_left, mask=inside & (head < NUM_QUERIES))
    tl.store(query_at + HALF, turned_right, mask=inside & (head < NUM_QUERIES))
    in_slot = slot * (NUM_KEYS * 2 * HALF) + place
    is_key = inside & (head >= NUM_QUERIES) & (head < NUM_ROTATED)
    key_at = keys + in_slot + (head - NUM_QUERIES) * (2 * HALF)
    tl.store(key_at, _stored(turned_left, scale, keys.dtype.element_ty, HAS_SCALES), mask=is_key)
    tl.store(
        key_at + HALF, _stored(turned_right, scale, keys.dtype.element_ty, HAS_SCALES), mask=is_key
    )
    is_value = inside & (head >= NUM_ROTATED)
    value_at = values + in_slot + (head - NUM_ROTATED) * (2 * HALF)
    tl.store(value_at, _stored(first, scale, values.dtype.element_ty, HAS_SCALES), mask=is_value)
    tl.store(
        value_at + HALF, _stored(second, scale, values.dtype.element_ty, HAS_SCALES), mask=is_value
    )


@triton.jit
def _stored(numbers, scale, DTYPE: tl.constexpr, HAS_SCALES: tl.constexpr):
    """As kv_cache.rounded."""
    if numbers.dtype != DTYPE:
        numbers = numbers.to(tl.float32)
        if HAS_SCALES:
            numbers = tl.div_rn(numbers, tl.broadcast_to(scale, numbers.shape))
        numbers = _in_float8(numbers)
    return numbers.to(DTYPE)


@triton.jit
def _in_float8(numbers):
    """The numbers, between the largest ones of float8. What is not a number stays so."""
    return tl.clamp(numbers, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gate(gate_and_up, gated, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Processes a part of one row."""
    DTYPE: tl.constexpr = gated.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < SIZE
    own = gate_and_up + row * (2 * SIZE) + places
    gates = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(own + SIZE, mask=inside, other=0.0).to(tl.float32)
    activated = (gates / (1.0 + tl.exp(-gates))).to(DTYPE).to(tl.float32)
    tl.store(gated + row * SIZE + places, (activated * ups).to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=("num_rows",))
def _round_rows(
    rows,
    steps,
    scales,
    input_scale,
    num_rows,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Processes a few groups of one row, each with a scale of its own."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, BLOCK)[None, :]
    inside = (group[:, None] < NUM_GROUPS) & (place < WIDTH)
    own = row * (NUM_GROUPS * WIDTH) + group[:, None] * WIDTH + place
    numbers = tl.load(rows + own, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        scale = tl.load(input_scale) + tl.zeros((GROUPS,), tl.float32)
    else:
        scale = tl.max(tl.abs(numbers), axis=1) * _INVERSE
        scale = tl.maximum(scale, _SMALLEST_SCALE)
    # Rounded as IEEE asks: `/` may be off by a unit of the last place.
    result = _in_float8(tl.div_rn(numbers, tl.expand_dims(scale, 1)))
    tl.store(steps + own, result.to(steps.dtype.element_ty), mask=inside)
    tl.store(scales + group.to(tl.int64) * num_rows + row, scale, mask=group < NUM_GROUPS)


class KernelOperations(LayerOperations):
    """Our kernels for the lean forward: four per layer in place of twelve or more operations.

    Steps must be DeviceSteps.
    """

    def add_and_norm(self, norm: nn.Module, group: RankGroup | None = None) -> AddAndNorm:
        """Uses a kernel for a NativeNorm, else torch. A group's kernel also adds over the ranks."""
        if not isinstance(norm, NativeNorm) or norm.weight.numel() > LARGEST_ROW:
            return super().add_and_norm(norm, group)
        weight_N, epsilon = norm.weight, norm.epsilon

        def run(hidden_TN: Tensor, delta_TN: Tensor | None) -> Tensor:
            if group is not None and delta_TN is not None:
                normed_TN = group.sum_add_and_norm(hidden_TN, delta_TN, weight_N, epsilon)
                if normed_TN is not None:
                    return normed_TN
                delta_TN = group.sum(delta_TN)
            return add_and_norm(hidden_TN, delta_TN, weight_N, epsilon)

        return run

    def rotation(self, cos_TD: Tensor, sin_TD: Tensor, layer: AttentionLayer) -> Rotation:
        """The factors unchanged, [T, D]."""
        return cos_TD, sin_TD

    def attend(self, layer: AttentionLayer) -> Attend:
        """Norms, rotates and stores with one kernel. Norms other than NativeNorm run before it."""
        norms = _known_norms(layer)
        others = bool(layer.head_norms) and norms is None

        def run(rows: Tensor, rotation: Rotation, step: Step) -> Tensor:
            assert isinstance(step, DeviceStep)
            num_tokens = rows.shape[0]
            heads_TAD = rows.view(num_tokens, layer.num_heads, layer.head_size)
            if others:
                heads_TAD = norm_heads(heads_TAD, layer)
            pages = step.pages(layer.index)
            query_TAD = rotate_and_store(
                *(heads_TAD, *rotation, step.slots_T, pages.keys_SHD, pages.values_SHD),
                norms,
                pages.scales_2H,
            )
            attended = step.attend_stored(query_TAD, layer.index, layer.scaling)
            return attended.view(num_tokens, -1)

        return run

    def gate(self, activation: nn.Module) -> Gate:
        """Uses a kernel for SiLU, else torch."""
        known = isinstance(activation, nn.SiLU | SiLUActivation)
        return gate if known else super().gate(activation)


def _known_norms(layer: AttentionLayer) -> HeadNorms | None:
    if not layer.head_norms:
        return None
    queries, keys = layer.head_norms
    if not isinstance(queries, NativeNorm) or not isinstance(keys, NativeNorm):
        return None
    if {queries.weight.shape, keys.weight.shape} != {(layer.head_size,)}:
        return None
    return HeadNorms(queries.weight, keys.weight, queries.epsilon, keys.epsilon)
