"""Attention over pages in Triton: a sequence's keys are shared among programs, with fixed bits.

A sequence's keys are cut into units. Units begin at the same positions in every sequence. Later
units are larger, which limits the memory for the results of a long sequence's units. The rows of a
tile attend to each unit separately; then a row's results are folded (merged by log-sum-exp) in the
order of the units. With many tiles (prefill, large batches) a program folds the units as it
computes them. With few tiles (decoding) several programs share a tile's units and store the result
of each unit, and a second kernel folds the results. The operations on a row are the same in both
cases, so that its bits depend on its own keys only. For the same reason all tiles have the same
size, and a product and a sum are never fused into one rounding (`enable_fp_fusion=False`).

The rows of a tile are tokens times the query heads of one key/value head, so a key is read once for
all these heads. A unit's keys are processed in blocks. The result of a unit has for each row the
outputs, the maximum of the scores (`top`, in base 2), and the sum of the weights relative to that
maximum (`total`).

Pages may be float8: keys and values are widened to the queries' dtype as they are read. With
scales, that of keys is a factor of the scores, and that of values a factor of the final outputs.

The node of a tree sees keys in slots that are not those of their positions. Still, it has the bits
of a chain with the same tokens. The keys that all nodes of a tree see are computed as above, up to
the end of their last whole block (`attend_kernel` with KEEPS). This leaves for each row the fold of
the whole units, and the sums of the unit that has begun. tree_kernel.py continues from there
with the other keys of the node's path, gathered in the order of their positions.

Import it only where kernels can run. Shapes: T tokens, A query heads, H key/value heads, D head
size (in kernels padded to a power of two), B sequences, P pages of a table, N pages in all, R rows
of a tile, K keys of a block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.float8_kernels import in_float8
from workers.engine.cuda.kv_cache import FLOAT8, KEY_BLOCK, PAGE_SIZE, LayerPages
from workers.process.kernels import on_device

ROWS = tl.constexpr(64)
"""Rows of a tile. All tiles have this size, so that a row's products have the same bits in all."""
BLOCK = tl.constexpr(KEY_BLOCK)
"""Keys per block. Units and pages are whole blocks."""
LN_2 = tl.constexpr(math.log(2))
_PAGE = tl.constexpr(PAGE_SIZE)
_ENDS = tl.constexpr(128)
"""Number of sequences examined at once in the search for the sequence of a tile or a token."""
_UNROLLED = tl.constexpr(8)
"""Number of stored units that are loaded together."""
_SMALL, _MIDDLE, _LARGE = tl.constexpr(256), tl.constexpr(1024), tl.constexpr(4096)
"""Keys per unit: in the first 64 units, in the next 48, and in those after them."""
_NUM_SMALL, _NUM_MIDDLE = tl.constexpr(64), tl.constexpr(48)
_SMALL_END, _MIDDLE_END = tl.constexpr(16_384), tl.constexpr(65_536)
SCRATCH_BYTES = 256 << 20
"""Maximum memory for stored results of units. In a step that would need more, programs fold the
units as they compute them.
"""
NARROW_HEAD = 128
"""Largest head size for which four warps hold a tile's sums, and shared memory three blocks."""
_ENOUGH_PROGRAMS = 512
"""Number of tiles times columns of heads from which on one program per tile suffices."""
_PROGRAMS = 1024
"""Approximate number of programs if a tile's units are shared. Some end at once (padding)."""


def attend_pages(
    query_TAD: Tensor,
    layer: LayerPages,
    cu_seq_B: Tensor,
    used_B: Tensor,
    table_BP: Tensor,
    scaling: float,
    *,
    causal: bool,
    scratch_bytes: int = SCRATCH_BYTES,
    input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `attention.attend`: outputs [T, A, D] of the queries' dtype, float32 log-sum-exps [A, T].

    With `input_scale`, outputs are then rounded to float8, as by linears.to_fp8. Both are zero for
    rows without keys. `scratch_bytes` changes how the result is computed, but not its bits.
    """
    output_TAD = output_for(query_TAD, input_scale)
    lse_AT = query_TAD.new_empty((query_TAD.shape[1], query_TAD.shape[0]), dtype=torch.float32)
    launch_units(
        (query_TAD, layer, cu_seq_B, used_B, table_BP, scaling),
        (output_TAD, lse_AT),
        causal=causal,
        keeps=False,
        scratch_bytes=scratch_bytes,
        input_scale=input_scale,
    )
    return output_TAD, lse_AT


def output_for(query_TAD: Tensor, input_scale: Tensor | None) -> Tensor:
    """Memory for outputs."""
    dtype = query_TAD.dtype if input_scale is None else FLOAT8
    return torch.empty(query_TAD.shape, dtype=dtype, device=query_TAD.device)


def launch_units(
    inputs: tuple[Tensor, LayerPages, Tensor, Tensor, Tensor, float],
    results: tuple[Tensor, Tensor],
    *,
    causal: bool,
    keeps: bool,
    scratch_bytes: int,
    input_scale: Tensor | None = None,
) -> None:
    """Launch attend_kernel, and fold_stored_kernel if programs share the units of a tile.

    `inputs`: the first arguments of attend_pages. `results`: outputs and log-sum-exps; if the
    kernels keep sums (`keeps`), the `kept` and `kept_sums` of tree_kernel.py. `input_scale`: that
    of outputs in float8.
    """
    query_TAD, layer, cu_seq_B, used_B, table_BP, scaling = inputs
    num_tokens, num_query_heads, head_size = query_TAD.shape
    keys_NPHD, values_NPHD = layer.keys_NPHD, layer.values_NPHD
    num_heads = keys_NPHD.shape[2]
    assert keys_NPHD.stride() == values_NPHD.stride(), "pages of keys and values are laid out alike"
    assert keys_NPHD.stride(3) == query_TAD.stride(2) == 1, "a head is contiguous"
    assert query_TAD.stride(1) == head_size, "a token's heads are contiguous"
    assert keys_NPHD.shape[1] == PAGE_SIZE, keys_NPHD.shape
    group = num_query_heads // num_heads
    tile_heads = min(group, ROWS.value)
    tile_tokens = ROWS.value // tile_heads
    num_sequences = used_B.shape[0]
    # Each sequence begins a new tile: at most one more than its tokens fill.
    num_tiles = num_tokens // tile_tokens + num_sequences
    num_columns = num_heads * math.ceil(group / tile_heads)
    units = num_units(table_BP.shape[1] * PAGE_SIZE)
    programs = share_out(
        units,
        num_tiles * num_columns,
        unit_bytes=4 * num_tokens * num_query_heads * (head_size + 2),
        scratch_bytes=scratch_bytes,
    )
    folds = programs == 1
    if folds:
        # The kernel does not access them.
        unit_outputs = unit_sums = results[1]
    else:
        rows = (units, num_tokens, num_query_heads)
        unit_outputs = results[1].new_empty((*rows, head_size))
        unit_sums = results[1].new_empty((2, *rows))
    shape = options_of(head_size)
    with on_device(query_TAD.device):
        attend_kernel[(num_columns, programs, num_tiles)](
            query_TAD,
            keys_NPHD,
            values_NPHD,
            cu_seq_B,
            used_B,
            table_BP,
            *results,
            unit_outputs,
            unit_sums,
            results[1] if layer.scales_2H is None else layer.scales_2H,
            results[1] if input_scale is None else input_scale,
            scaling / math.log(2),
            int(causal),
            num_sequences,
            num_tokens,
            table_BP.stride(0),
            query_TAD.stride(0),
            *keys_NPHD.stride()[:3],
            units * num_tokens * num_query_heads,
            NUM_QUERY_HEADS=num_query_heads,
            GROUP=group,
            TILE_HEADS=tile_heads,
            FOLDS=folds,
            KEEPS=keeps,
            HAS_SCALES=layer.scales_2H is not None,
            num_warps=4 if head_size <= NARROW_HEAD else 8,
            num_stages=3 if head_size <= NARROW_HEAD else 2,
            **shape,
        )
        if not folds:
            fold_stored_kernel[(num_tokens, num_query_heads)](
                unit_outputs,
                unit_sums,
                cu_seq_B,
                used_B,
                *results,
                query_TAD,
                results[1] if layer.scales_2H is None else layer.scales_2H,
                results[1] if input_scale is None else input_scale,
                int(causal),
                num_sequences,
                num_tokens,
                units * num_tokens * num_query_heads,
                NUM_QUERY_HEADS=num_query_heads,
                GROUP=group,
                KEEPS=keeps,
                HAS_SCALES=layer.scales_2H is not None,
                num_warps=1,
                **shape,
            )


def options_of(head_size: int) -> dict[str, Any]:
    """The options with which every attention kernel is compiled for heads of this size."""
    return {
        "HEAD_SIZE": head_size,
        "BLOCK_D": max(16, triton.next_power_of_2(head_size)),
        "enable_fp_fusion": False,
    }


def num_units(num_keys: int) -> int:
    """The number of units of `num_keys` keys, including one that is not full."""
    small: int = math.ceil(min(num_keys, _SMALL_END.value) / _SMALL.value)
    past_small = max(min(num_keys, _MIDDLE_END.value) - _SMALL_END.value, 0)
    middle: int = math.ceil(past_small / _MIDDLE.value)
    large: int = math.ceil(max(num_keys - _MIDDLE_END.value, 0) / _LARGE.value)
    return small + middle + large


def share_out(units: int, num_tiles: int, *, unit_bytes: int, scratch_bytes: int) -> int:
    """The number of programs that share a tile's units. A single program folds as it computes.

    `num_tiles` counts tiles times columns of heads. `unit_bytes`: storage per unit over all rows.
    """
    if num_tiles >= _ENOUGH_PROGRAMS or units * unit_bytes > scratch_bytes:
        return 1
    return min(units, math.ceil(_PROGRAMS / num_tiles))


@triton.jit
def units_of(num_keys):
    """As `num_units`, on the device."""
    small = tl.minimum(num_keys, _SMALL_END)
    middle = tl.maximum(tl.minimum(num_keys, _MIDDLE_END) - _SMALL_END, 0)
    large = tl.maximum(num_keys - _MIDDLE_END, 0)
    return (
        (small + (_SMALL - 1)) // _SMALL
        + (middle + (_MIDDLE - 1)) // _MIDDLE
        + (large + (_LARGE - 1)) // _LARGE
    )


@triton.jit
def start_of(unit):
    """The first position of a unit."""
    small = tl.minimum(unit, _NUM_SMALL)
    middle = tl.maximum(tl.minimum(unit - _NUM_SMALL, _NUM_MIDDLE), 0)
    large = tl.maximum(unit - (_NUM_SMALL + _NUM_MIDDLE), 0)
    return small * _SMALL + middle * _MIDDLE + large * _LARGE


@triton.jit
def whole_units_of(num_keys):
    """As `units_of`, without a unit that is not full."""
    units = units_of(num_keys)
    return units - (start_of(units) > num_keys).to(tl.int32)


@triton.jit
def weigh(scores_RK, top_R, total_R):
    """The weights of a block's scores, the factor for earlier sums, and the new top and total.

    Scores are in base 2; those of keys that a row does not see are -inf.
    """
    new_top_R = tl.maximum(top_R, tl.max(scores_RK, axis=1))
    # Avoids the difference of two infinities in rows that have seen no key yet.
    base_R = tl.where(new_top_R > -float("inf"), new_top_R, 0.0)
    weights_RK = tl.exp2(scores_RK - base_R[:, None])
    kept_R = tl.exp2(top_R - base_R)
    return weights_RK, kept_R, new_top_R, total_R * kept_R + tl.sum(weights_RK, axis=1)


@triton.jit
def fold(outputs, top, total, unit_outputs, unit_top, unit_total):
    """Add one unit to the sums, which are relative to the maximum score `top`, in base 2.

    A row that sees no key of the unit does not change: it is multiplied by 1, and 0 is added.
    """
    new_top = tl.maximum(top, unit_top)
    # Avoids the difference of two infinities in rows that have seen no key yet.
    base = tl.where(new_top > -float("inf"), new_top, 0.0)
    kept = tl.exp2(top - base)
    added = tl.exp2(unit_top - base)
    outputs = outputs * tl.expand_dims(kept, -1) + unit_outputs * tl.expand_dims(added, -1)
    return outputs, new_top, total * kept + unit_total * added


@triton.jit
def finish(outputs, top, total):
    """Outputs and natural log-sum-exps; zeros for rows that saw no key."""
    sees = total > 0.0
    safe = tl.where(sees, total, 1.0)
    lse = tl.where(sees, (top + tl.log2(safe)) * LN_2, 0.0)
    return outputs / tl.expand_dims(safe, -1), lse


@triton.jit
def in_output(outputs, input_scale, DTYPE: tl.constexpr, STORED: tl.constexpr):
    """Final outputs as they are stored: in the model's dtype, or from that in float8."""
    numbers = outputs.to(DTYPE)
    if STORED != DTYPE:
        scale = tl.zeros_like(outputs) + tl.load(input_scale)
        numbers = in_float8(tl.div_rn(numbers.to(tl.float32), scale))
    return numbers.to(STORED)


@triton.jit
def sequence_of(ends, num_sequences, place, TILE_TOKENS: tl.constexpr):
    """The sequence to which `place` belongs.

    `place` is a tile if TILE_TOKENS > 0, where each sequence begins a new tile, else a token.
    """
    count = 0
    for first in range(1, num_sequences, _ENDS):
        sequence = first + tl.arange(0, _ENDS)
        inside = sequence < num_sequences
        begins = tl.load(ends + sequence, mask=inside, other=0)
        if TILE_TOKENS > 0:
            begins = begins // TILE_TOKENS + sequence
        count += tl.sum((inside & (begins <= place)).to(tl.int32), axis=0)
    return count


_VARYING = ("causal", "num_sequences", "num_tokens", "table_stride", "num_rows")
_UNALIGNED = ("ends", "used", "table")


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def attend_kernel(
    query,
    keys,
    values,
    ends,
    used,
    table,
    output,
    lse,
    unit_outputs,
    unit_sums,
    scales,
    input_scale,
    scaling,
    causal,
    num_sequences,
    num_tokens,
    table_stride,
    query_stride,
    page_stride,
    key_stride,
    head_stride,
    num_rows,
    NUM_QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FOLDS: tl.constexpr,
    KEEPS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Program (c, u, i) computes units u, u + grid, ... of tile i, for column c of the heads.

    With KEEPS, `output` and `lse` are the `kept` and `kept_sums` of tree_kernel.py.
    """
    TILE_TOKENS: tl.constexpr = ROWS // TILE_HEADS
    COLUMNS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    tile = tl.program_id(2)
    if FOLDS:
        # The last tiles of a causal slice have the most keys, so they begin first.
        tile = tl.num_programs(2) - 1 - tile
    sequence = sequence_of(ends, num_sequences, tile, TILE_TOKENS)
    begin = tl.load(ends + sequence)
    end = tl.load(ends + sequence + 1)
    num_keys = tl.load(used + sequence)
    first_token = begin + (tile - begin // TILE_TOKENS - sequence) * TILE_TOKENS
    last_token = tl.minimum(first_token + TILE_TOKENS, end) - 1
    # The number of keys that the tile's last token sees. No other token of the tile sees more.
    tile_keys = num_keys - (end - 1 - last_token) * causal
    units = units_of(tile_keys)
    first_unit = tl.program_id(1)
    if first_token >= end or (first_unit >= units and not FOLDS):
        return

    row_R = tl.arange(0, ROWS)
    dim_D = tl.arange(0, BLOCK_D)
    token_R = first_token + row_R // TILE_HEADS
    group_head_R = (tl.program_id(0) % COLUMNS) * TILE_HEADS + row_R % TILE_HEADS
    head = tl.program_id(0) // COLUMNS
    query_head_R = head * GROUP + group_head_R
    is_row_R = (row_R < TILE_TOKENS * TILE_HEADS) & (token_R < end) & (group_head_R < GROUP)
    seen_R = num_keys - (end - 1 - token_R) * causal
    inside_D = dim_D < HEAD_SIZE
    inside_RD = is_row_R[:, None] & inside_D[None, :]
    query_RD = tl.load(
        query
        + token_R[:, None].to(tl.int64) * query_stride
        + query_head_R[:, None] * HEAD_SIZE
        + dim_D[None, :],
        mask=inside_RD,
        other=0.0,
    )
    place_R = token_R.to(tl.int64) * NUM_QUERY_HEADS + query_head_R
    step = num_tokens.to(tl.int64) * NUM_QUERY_HEADS
    if HAS_SCALES:
        scaling *= tl.load(scales + head)
    key_K = tl.arange(0, BLOCK)
    head_KD = key_K[:, None] * key_stride + head * head_stride + dim_D[None, :]

    table += sequence.to(tl.int64) * table_stride
    # With KEEPS, a unit that is not full is not folded.
    last_unit = whole_units_of(tile_keys) if FOLDS and KEEPS else units
    outputs_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
    top_R = tl.full((ROWS,), -float("inf"), tl.float32)
    total_R = tl.zeros((ROWS,), tl.float32)
    for unit in range(first_unit, last_unit, tl.num_programs(1)):
        unit_RD, unit_top_R, unit_total_R = attend_unit(
            query_RD,
            keys,
            values,
            table,
            head_KD,
            inside_D,
            seen_R,
            start_of(unit),
            tl.minimum(start_of(unit + 1), tile_keys),
            scaling,
            page_stride,
            key_stride,
            BLOCK_D,
        )
        if FOLDS:
            outputs_RD, top_R, total_R = fold(
                outputs_RD, top_R, total_R, unit_RD, unit_top_R, unit_total_R
            )
        else:
            stored_R = unit * step + place_R
            tl.store(
                unit_outputs + stored_R[:, None] * HEAD_SIZE + dim_D[None, :],
                unit_RD,
                mask=inside_RD,
            )
            tl.store(unit_sums + stored_R, unit_top_R, mask=is_row_R)
            tl.store(unit_sums + num_rows + stored_R, unit_total_R, mask=is_row_R)
    if FOLDS and KEEPS:
        tl.store(output + place_R[:, None] * HEAD_SIZE + dim_D[None, :], outputs_RD, mask=inside_RD)
        tl.store(lse + place_R, top_R, mask=is_row_R)
        tl.store(lse + 2 * step + place_R, total_R, mask=is_row_R)
        unit_RD, unit_top_R, unit_total_R = attend_unit(
            query_RD,
            keys,
            values,
            table,
            head_KD,
            inside_D,
            seen_R,
            start_of(last_unit),
            tile_keys,
            scaling,
            page_stride,
            key_stride,
            BLOCK_D,
        )
        begun_R = step + place_R
        tl.store(output + begun_R[:, None] * HEAD_SIZE + dim_D[None, :], unit_RD, mask=inside_RD)
        tl.store(lse + begun_R, unit_top_R, mask=is_row_R)
        tl.store(lse + 2 * step + begun_R, unit_total_R, mask=is_row_R)
    elif FOLDS:
        outputs_RD, lse_R = finish(outputs_RD, top_R, total_R)
        if HAS_SCALES:
            outputs_RD *= tl.load(scales + NUM_QUERY_HEADS // GROUP + head)
        tl.store(
            output + place_R[:, None] * HEAD_SIZE + dim_D[None, :],
            in_output(outputs_RD, input_scale, query.dtype.element_ty, output.dtype.element_ty),
            mask=inside_RD,
        )
        tl.store(lse + query_head_R.to(tl.int64) * num_tokens + token_R, lse_R, mask=is_row_R)


@triton.jit
def attend_unit(
    query_RD,
    keys,
    values,
    table,
    head_KD,
    inside_D,
    seen_R,
    start,
    stop,
    scaling,
    page_stride,
    key_stride,
    BLOCK_D: tl.constexpr,
):
    """Outputs, tops and totals of a unit's keys, from position `start` to `stop`.

    `table`: the row of the sequence. `head_KD`: the places of a block's keys after its first one.
    Row r sees the positions before `seen_R[r]`.
    """
    unit_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
    unit_top_R = tl.full((ROWS,), -float("inf"), tl.float32)
    unit_total_R = tl.zeros((ROWS,), tl.float32)
    key_K = tl.arange(0, BLOCK)
    for position in range(start, stop, BLOCK):
        number = position // _PAGE
        page = tl.load(table + number)
        block = page.to(tl.int64) * page_stride + (position - number * _PAGE) * key_stride
        inside_KD = (position + key_K < stop)[:, None] & inside_D[None, :]
        keys_KD = tl.load(keys + block + head_KD, mask=inside_KD, other=0.0).to(query_RD.dtype)
        scores_RK = tl.dot(query_RD, tl.trans(keys_KD)) * scaling
        sees_RK = position + key_K[None, :] < seen_R[:, None]
        scores_RK = tl.where(sees_RK, scores_RK, -float("inf"))
        weights_RK, kept_R, unit_top_R, unit_total_R = weigh(scores_RK, unit_top_R, unit_total_R)
        values_KD = tl.load(values + block + head_KD, mask=inside_KD, other=0.0).to(query_RD.dtype)
        unit_RD = tl.dot(weights_RK.to(values_KD.dtype), values_KD, unit_RD * kept_R[:, None])
    return unit_RD, unit_top_R, unit_total_R


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def fold_stored_kernel(
    unit_outputs,
    unit_sums,
    ends,
    used,
    output,
    lse,
    query,
    scales,
    input_scale,
    causal,
    num_sequences,
    num_tokens,
    num_rows,
    NUM_QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEEPS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Program (t, a) folds, in order, the units of row (t, a) that hold keys. Reads no `query`.

    With KEEPS, a unit that is not full is copied instead; results are as in attend_kernel.
    """
    token = tl.program_id(0)
    query_head = tl.program_id(1)
    sequence = sequence_of(ends, num_sequences, token, 0)
    end = tl.load(ends + sequence + 1)
    num_keys = tl.load(used + sequence) - (end - 1 - token) * causal
    units = whole_units_of(num_keys) if KEEPS else units_of(num_keys)
    dim_D = tl.arange(0, BLOCK_D)
    inside_D = dim_D < HEAD_SIZE
    place = token.to(tl.int64) * NUM_QUERY_HEADS + query_head
    step = num_tokens.to(tl.int64) * NUM_QUERY_HEADS
    outputs_1D = tl.zeros((1, BLOCK_D), tl.float32)
    top_1 = tl.full((1,), -float("inf"), tl.float32)
    total_1 = tl.zeros((1,), tl.float32)
    one = tl.arange(0, 1)
    for first in range(0, units, _UNROLLED):
        for number in tl.static_range(_UNROLLED):
            unit = first + number
            stored = unit * step + place + one
            there = (unit < units) & (one == 0)
            unit_1D = tl.load(
                unit_outputs + stored[:, None] * HEAD_SIZE + dim_D[None, :],
                mask=there[:, None] & inside_D[None, :],
                other=0.0,
            )
            unit_top_1 = tl.load(unit_sums + stored, mask=there, other=-float("inf"))
            unit_total_1 = tl.load(unit_sums + num_rows + stored, mask=there, other=0.0)
            outputs_1D, top_1, total_1 = fold(
                outputs_1D, top_1, total_1, unit_1D, unit_top_1, unit_total_1
            )
    place_1 = place + one
    if KEEPS:
        tl.store(
            output + place_1[:, None] * HEAD_SIZE + dim_D[None, :],
            outputs_1D,
            mask=inside_D[None, :],
        )
        tl.store(lse + place_1, top_1)
        tl.store(lse + 2 * step + place_1, total_1)
        stored = units * step + place_1
        there = (start_of(units) < num_keys) & (one == 0)
        unit_1D = tl.load(
            unit_outputs + stored[:, None] * HEAD_SIZE + dim_D[None, :],
            mask=there[:, None] & inside_D[None, :],
            other=0.0,
        )
        begun_1 = step + place_1
        tl.store(
            output + begun_1[:, None] * HEAD_SIZE + dim_D[None, :], unit_1D, mask=inside_D[None, :]
        )
        unit_top_1 = tl.load(unit_sums + stored, mask=there, other=-float("inf"))
        tl.store(lse + begun_1, unit_top_1)
        unit_total_1 = tl.load(unit_sums + num_rows + stored, mask=there, other=0.0)
        tl.store(lse + 2 * step + begun_1, unit_total_1)
    else:
        outputs_1D, lse_1 = finish(outputs_1D, top_1, total_1)
        if HAS_SCALES:
            outputs_1D *= tl.load(scales + NUM_QUERY_HEADS // GROUP + query_head // GROUP)
        tl.store(
            output + place_1[:, None] * HEAD_SIZE + dim_D[None, :],
            in_output(outputs_1D, input_scale, query.dtype.element_ty, output.dtype.element_ty),
            mask=inside_D[None, :],
        )
        tl.store(lse + query_head.to(tl.int64) * num_tokens + token + one, lse_1)
