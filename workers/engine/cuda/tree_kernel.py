"""A Triton kernel: attention of the nodes of trees, each with the bits that it has in a chain.

It continues where attend_kernel stopped: after the last whole block of the keys that all nodes of a
tree see. The further keys of a node are those of its path, in the order of their positions, from
whatever slots they are in. Units begin at the same positions as in a chain, and the operations on a
row are the same (attention_kernel.py). Import it only where kernels can run.

Shapes: T nodes, A query heads, D head size, B trees, P pages of a table, K slots of a path, R rows
of a tile.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.attention_kernel import (
    BLOCK,
    NARROW_HEAD,
    ROWS,
    SCRATCH_BYTES,
    finish,
    fold,
    in_output,
    launch_units,
    options_of,
    output_for,
    sequence_of,
    start_of,
    units_of,
    weigh,
    whole_units_of,
)
from workers.engine.cuda.kv_cache import LayerPages
from workers.process.kernels import on_device


def attend_paths(
    query_TAD: Tensor,
    layer: LayerPages,
    cu_seq_B: Tensor,
    shared_B: Tensor,
    table_BP: Tensor,
    slots_TK: Tensor,
    counts_T: Tensor,
    scaling: float,
    *,
    scratch_bytes: int = SCRATCH_BYTES,
    input_scale: Tensor | None = None,
) -> Tensor:
    """Outputs [T, A, D] of the nodes of trees, with the bits that they have in chains.

    All nodes of tree b see the first `shared_B[b]` keys of its pages; this is a number of whole
    blocks. Node t also sees the first `counts_T[t]` of `slots_TK[t]`, at least one, which are in
    the order of their positions. All integers are int32. `input_scale`: as in attend_pages.
    """
    num_tokens, num_query_heads, head_size = query_TAD.shape
    assert slots_TK.is_contiguous()
    assert counts_T.shape == (num_tokens,) == slots_TK.shape[:1]
    # Of each row the fold of the whole units, and the unit that has begun.
    kept = query_TAD.new_empty((2, *query_TAD.shape), dtype=torch.float32)
    kept_sums = kept.new_empty((2, 2, num_tokens, num_query_heads))
    launch_units(
        (query_TAD, layer, cu_seq_B, shared_B, table_BP, scaling),
        (kept, kept_sums),
        causal=False,
        keeps=True,
        scratch_bytes=scratch_bytes,
    )
    output_TAD = output_for(query_TAD, input_scale)
    num_heads = layer.keys_SHD.shape[1]
    group = num_query_heads // num_heads
    tile_heads = min(group, ROWS.value)
    with on_device(query_TAD.device):
        attend_paths_kernel[(num_heads * math.ceil(group / tile_heads), num_tokens)](
            query_TAD,
            layer.keys_SHD,
            layer.values_SHD,
            cu_seq_B,
            shared_B,
            slots_TK,
            counts_T,
            kept,
            kept_sums,
            output_TAD,
            kept_sums if layer.scales_2H is None else layer.scales_2H,
            kept_sums if input_scale is None else input_scale,
            scaling / math.log(2),
            shared_B.shape[0],
            num_tokens,
            slots_TK.shape[1],
            query_TAD.stride(0),
            *layer.keys_SHD.stride()[:2],
            NUM_QUERY_HEADS=num_query_heads,
            GROUP=group,
            TILE_HEADS=tile_heads,
            HAS_SCALES=layer.scales_2H is not None,
            num_warps=4 if head_size <= NARROW_HEAD else 8,
            num_stages=2,
            **options_of(head_size),
        )
    return output_TAD


@triton.jit(
    do_not_specialize=("num_sequences", "num_tokens", "num_slots"),
    do_not_specialize_on_alignment=("ends", "shared", "slots", "counts"),
)
def attend_paths_kernel(
    query,
    keys,
    values,
    ends,
    shared,
    slots,
    counts,
    kept,
    kept_sums,
    output,
    scales,
    input_scale,
    scaling,
    num_sequences,
    num_tokens,
    num_slots,
    query_stride,
    key_stride,
    head_stride,
    NUM_QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Program (c, t) computes node t, for column c of the heads. Most rows of its tile are empty:
    a tile of another size could have other bits.
    """
    COLUMNS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    token = tl.program_id(1)
    sequence = sequence_of(ends, num_sequences, token, 0)
    begin = tl.load(shared + sequence)
    count = tl.load(counts + token)
    row_R = tl.arange(0, ROWS)
    dim_D = tl.arange(0, BLOCK_D)
    group_head_R = (tl.program_id(0) % COLUMNS) * TILE_HEADS + row_R
    head = tl.program_id(0) // COLUMNS
    query_head_R = head * GROUP + group_head_R
    is_row_R = (row_R < TILE_HEADS) & (group_head_R < GROUP)
    inside_D = dim_D < HEAD_SIZE
    inside_RD = is_row_R[:, None] & inside_D[None, :]
    place_R = token.to(tl.int64) * NUM_QUERY_HEADS + query_head_R
    place_RD = place_R[:, None] * HEAD_SIZE + dim_D[None, :]
    query_RD = tl.load(
        query
        + token.to(tl.int64) * query_stride
        + query_head_R[:, None] * HEAD_SIZE
        + dim_D[None, :],
        mask=inside_RD,
        other=0.0,
    )
    step = num_tokens.to(tl.int64) * NUM_QUERY_HEADS
    outputs_RD = tl.load(kept + place_RD, mask=inside_RD, other=0.0)
    top_R = tl.load(kept_sums + place_R, mask=is_row_R, other=-float("inf"))
    total_R = tl.load(kept_sums + 2 * step + place_R, mask=is_row_R, other=0.0)
    unit_RD = tl.load(kept + step * HEAD_SIZE + place_RD, mask=inside_RD, other=0.0)
    unit_top_R = tl.load(kept_sums + step + place_R, mask=is_row_R, other=-float("inf"))
    unit_total_R = tl.load(kept_sums + 3 * step + place_R, mask=is_row_R, other=0.0)
    if HAS_SCALES:
        scaling *= tl.load(scales + head)
    key_K = tl.arange(0, BLOCK)
    unit_end = start_of(whole_units_of(begin) + 1)
    slots += token.to(tl.int64) * num_slots
    for first in range(0, count, BLOCK):
        if begin + first == unit_end:
            outputs_RD, top_R, total_R = fold(
                outputs_RD, top_R, total_R, unit_RD, unit_top_R, unit_total_R
            )
            unit_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
            unit_top_R = tl.full((ROWS,), -float("inf"), tl.float32)
            unit_total_R = tl.zeros((ROWS,), tl.float32)
            unit_end = start_of(units_of(unit_end) + 1)
        inside_K = first + key_K < count
        slot_K = tl.load(slots + first + key_K, mask=inside_K, other=0)
        row_KD = slot_K[:, None].to(tl.int64) * key_stride + head * head_stride + dim_D[None, :]
        inside_KD = inside_K[:, None] & inside_D[None, :]
        keys_KD = tl.load(keys + row_KD, mask=inside_KD, other=0.0).to(query_RD.dtype)
        scores_RK = tl.dot(query_RD, tl.trans(keys_KD)) * scaling
        scores_RK = tl.where(inside_K[None, :], scores_RK, -float("inf"))
        weights_RK, kept_R, unit_top_R, unit_total_R = weigh(scores_RK, unit_top_R, unit_total_R)
        values_KD = tl.load(values + row_KD, mask=inside_KD, other=0.0).to(query_RD.dtype)
        unit_RD = tl.dot(weights_RK.to(values_KD.dtype), values_KD, unit_RD * kept_R[:, None])
    outputs_RD, top_R, total_R = fold(outputs_RD, top_R, total_R, unit_RD, unit_top_R, unit_total_R)
    outputs_RD, _ = finish(outputs_RD, top_R, total_R)
    if HAS_SCALES:
        outputs_RD *= tl.load(scales + NUM_QUERY_HEADS // GROUP + head)
    stored_RD = in_output(outputs_RD, input_scale, query.dtype.element_ty, output.dtype.element_ty)
    tl.store(output + place_RD, stored_RD, mask=inside_RD)
