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

from workers.engine.cuda.float8_kernels import (
    LARGEST_ROW,
    Rounded,
    in_float8,
    round_rows,
    store_row,
    warps_of,
)
from workers.engine.cuda.kv_cache import FLOAT8
from workers.engine.cuda.linears import RoundedRows, Rounding, rounding_of
from workers.engine.cuda.step import DeviceStep
from workers.engine.forward import (
    AddAndNorm,
    Attend,
    AttentionLayer,
    Gate,
    LayerOperations,
    ProductInput,
    Rotation,
    Step,
    norm_heads,
)
from workers.engine.modules import NativeNorm
from workers.engine.parallel.group import RankGroup
from workers.process.kernels import on_device

_HEADS_OF_A_PROGRAM = 8
_GATES_OF_A_PROGRAM = 1024


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The weights [D] of the norms of queries and keys, and their epsilons."""

    query_weight_D: Tensor
    key_weight_D: Tensor
    query_epsilon: float
    key_epsilon: float


def add_and_norm(
    hidden_TN: Tensor,
    delta_TN: Tensor | None,
    weight_N: Tensor,
    epsilon: float,
    rounding: Rounding | None = None,
) -> Tensor | RoundedRows:
    """Add `delta_TN` to `hidden_TN` in place; return the sum's RMS norm, times the weight.

    The sum is rounded once, and the norm of the rounded sum once more. With `rounding`, the result
    is then in float8, with the bits of `round_rows`. N is at most LARGEST_ROW; all tensors have one
    dtype.
    """
    num_rows, size = hidden_TN.shape
    assert size <= LARGEST_ROW, size
    assert hidden_TN.is_contiguous()
    assert weight_N.shape == (size,)
    assert delta_TN is None or delta_TN.shape == hidden_TN.shape
    normed_TN = torch.empty_like(hidden_TN) if rounding is None else hidden_TN
    rounded = Rounded(num_rows, size, rounding, hidden_TN)
    block = triton.next_power_of_2(size)
    with on_device(hidden_TN.device):
        _add_and_norm[(num_rows,)](
            hidden_TN,
            hidden_TN if delta_TN is None else delta_TN.contiguous(),
            weight_N,
            normed_TN,
            *rounded.arguments,
            epsilon,
            num_rows,
            SIZE=size,
            BLOCK=block,
            HAS_DELTA=delta_TN is not None,
            **rounded.constants,
            num_warps=warps_of(block),
            # The bits are the same with `rounding` and without.
            enable_fp_fusion=False,
        )
    return rounded.rows or normed_TN


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
            num_warps=warps_of(_HEADS_OF_A_PROGRAM * half_block),
            # A product and a sum in one rounding would differ from torch in float32.
            enable_fp_fusion=False,
        )
    return queries_TQD


def gate(gate_and_up: Tensor, rounding: Rounding | None = None) -> Tensor | RoundedRows:
    """SiLU of the gates times the ups: [T, 2 x F] in, gates first; [T, F] out.

    With `rounding`, the result is then in float8, with the bits of `round_rows`.
    """
    num_rows, both = gate_and_up.shape
    assert both % 2 == 0
    size = both // 2
    own_scale = rounding is not None and rounding.block is None and rounding.input_scale is None
    if own_scale and size > LARGEST_ROW:
        assert rounding is not None
        gated = gate(gate_and_up)
        assert isinstance(gated, Tensor)
        return round_rows(gated, rounding)
    gated_TF = gate_and_up.new_empty((num_rows, size)) if rounding is None else gate_and_up
    rounded = Rounded(num_rows, size, rounding, gate_and_up)
    block = triton.next_power_of_2(size)
    if not own_scale:
        block = min(_GATES_OF_A_PROGRAM, block)
    with on_device(gate_and_up.device):
        _gate[(num_rows, triton.cdiv(size, block))](
            gate_and_up.contiguous(),
            gated_TF,
            *rounded.arguments,
            num_rows,
            SIZE=size,
            BLOCK=block,
            **rounded.constants,
            num_warps=warps_of(block),
        )
    return rounded.rows or gated_TF


@triton.jit(do_not_specialize=("num_rows",))
def _add_and_norm(
    hidden,
    delta,
    weight,
    normed,
    steps,
    scales,
    input_scale,
    epsilon,
    num_rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Processes one row."""
    number = tl.program_id(0).to(tl.int64)
    row = number * SIZE
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
    store_row(
        result,
        normed,
        steps,
        scales,
        input_scale,
        number,
        0,
        num_rows,
        SIZE,
        BLOCK,
        WIDTH,
        HAS_SCALE,
    )


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
        numbers = in_float8(numbers)
    return numbers.to(DTYPE)


@triton.jit(do_not_specialize=("num_rows",))
def _gate(
    gate_and_up,
    gated,
    steps,
    scales,
    input_scale,
    num_rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Processes a part of one row."""
    DTYPE: tl.constexpr = gated.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    places = first + tl.arange(0, BLOCK)
    inside = places < SIZE
    own = gate_and_up + row * (2 * SIZE) + places
    gates = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(own + SIZE, mask=inside, other=0.0).to(tl.float32)
    activated = (gates / (1.0 + tl.exp(-gates))).to(DTYPE).to(tl.float32)
    result = (activated * ups).to(DTYPE)
    store_row(
        result,
        gated,
        steps,
        scales,
        input_scale,
        row,
        first,
        num_rows,
        SIZE,
        BLOCK,
        WIDTH,
        HAS_SCALE,
    )


class KernelOperations(LayerOperations):
    """Our kernels for the lean forward: four per layer in place of twelve or more operations.

    A kernel before a float8 product also rounds its rows. Steps must be DeviceSteps.
    """

    def add_and_norm(
        self, norm: nn.Module, group: RankGroup | None = None, into: nn.Module | None = None
    ) -> AddAndNorm:
        """Uses a kernel for a NativeNorm, else torch."""
        if not isinstance(norm, NativeNorm) or norm.weight.numel() > LARGEST_ROW:
            return super().add_and_norm(norm, group)
        weight_N, epsilon, rounding = norm.weight, norm.epsilon, rounding_of(into)

        def run(hidden_TN: Tensor, delta_TN: Tensor | None) -> ProductInput:
            if group is not None and delta_TN is not None:
                delta_TN = group.sum(delta_TN)
            return add_and_norm(hidden_TN, delta_TN, weight_N, epsilon, rounding)

        return run

    def rotation(self, cos_TD: Tensor, sin_TD: Tensor, layer: AttentionLayer) -> Rotation:
        """The factors unchanged, [T, D]."""
        return cos_TD, sin_TD

    def attend(self, layer: AttentionLayer, into: nn.Module | None = None) -> Attend:
        """Norms, rotates and stores with one kernel. Norms other than NativeNorm run before it.

        If all rows of the float8 product after it have one scale, attention rounds them.
        """
        norms = _known_norms(layer)
        rounding = rounding_of(into)
        given = None
        if rounding is not None and rounding.input_scale is not None:
            given = _SameScale(rounding.input_scale)
        others = bool(layer.head_norms) and norms is None

        def run(rows: Tensor, rotation: Rotation, step: Step) -> ProductInput:
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
            attended_TN = step.attend_stored(
                query_TAD, layer.index, layer.scaling, None if given is None else given.scale
            ).view(num_tokens, -1)
            if given is None or attended_TN.dtype != FLOAT8:
                return attended_TN
            return RoundedRows(attended_TN, given.of(num_tokens))

        return run

    def gate(self, activation: nn.Module, into: nn.Module | None = None) -> Gate:
        """Uses a kernel for SiLU, else torch."""
        if not isinstance(activation, nn.SiLU | SiLUActivation):
            return super().gate(activation)
        rounding = rounding_of(into)
        return lambda gate_and_up: gate(gate_and_up, rounding)


class _SameScale:
    """One scale, repeated for each row of a product."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale
        # Captured steps refer to these, so none is ever dropped.
        self._repeated: dict[int, Tensor] = {}

    def of(self, num_rows: int) -> Tensor:
        """The scales [T, 1]."""
        size = triton.next_power_of_2(num_rows)
        if size not in self._repeated:
            self._repeated[size] = self.scale.expand(size, 1).contiguous()
        return self._repeated[size][:num_rows]


def _known_norms(layer: AttentionLayer) -> HeadNorms | None:
    if not layer.head_norms:
        return None
    queries, keys = layer.head_norms
    if not isinstance(queries, NativeNorm) or not isinstance(keys, NativeNorm):
        return None
    if {queries.weight.shape, keys.weight.shape} != {(layer.head_size,)}:
        return None
    return HeadNorms(queries.weight, keys.weight, queries.epsilon, keys.epsilon)
