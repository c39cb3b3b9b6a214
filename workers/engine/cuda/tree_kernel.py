"""A Triton kernel: attention of a tree's tokens to keys beside their stem, merged with the stem's.

The rows of a tile are tokens times the query heads of one key/value head, as in
attention_kernel.py. Import it only where kernels can run.

Shapes: T tokens, A query heads, H key/value heads, D head size, B trees, W tokens of a tree, K keys
beside a stem, S slots, R rows of a tile.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.attention_kernel import (
    BLOCK,
    LN_2,
    NARROW_HEAD,
    ROWS,
    finish,
    fold,
    options_of,
    weigh,
)
from workers.engine.cuda.kv_cache import LayerPages
from workers.process.kernels import on_device


def attend_beside_stems(
    query_TAD: Tensor,
    layer: LayerPages,
    key_slots_BK: Tensor,
    seen_BWK: Tensor,
    stem_TAD: Tensor,
    stem_lse_AT: Tensor,
    stem_used_B: Tensor,
    scaling: float,
) -> Tensor:
    """Outputs [T, A, D] over the stem and the other keys, in the queries' dtype; T = B x W, packed.

    Of the slots `key_slots_BK` (int64), token w sees those where `seen_BWK` (bool) is True.
    `stem_TAD` and `stem_lse_AT` (float32) are the results over the stems; they are read for trees
    whose `stem_used_B` (int32) is not 0. A token that sees no key at all gets zeros.
    """
    num_trees, width, num_keys = seen_BWK.shape
    num_tokens, num_query_heads, head_size = query_TAD.shape
    keys_SHD = layer.keys_SHD
    num_heads = keys_SHD.shape[1]
    assert keys_SHD.stride() == layer.values_SHD.stride(), "keys and values are laid out alike"
    assert query_TAD.stride()[1:] == (head_size, 1), "a token's heads are contiguous"
    assert stem_TAD.is_contiguous()
    assert seen_BWK.is_contiguous()
    assert key_slots_BK.is_contiguous()
    group = num_query_heads // num_heads
    tile_heads = min(group, ROWS.value)
    columns = num_heads * math.ceil(group / tile_heads)
    tiles = math.ceil(width / (ROWS.value // tile_heads))
    output_TAD = torch.empty(query_TAD.shape, dtype=query_TAD.dtype, device=query_TAD.device)
    with on_device(query_TAD.device):
        attend_beside_stems_kernel[(columns, tiles, num_trees)](
            query_TAD,
            keys_SHD,
            layer.values_SHD,
            key_slots_BK,
            seen_BWK.view(torch.uint8),
            stem_used_B,
            stem_TAD,
            stem_lse_AT,
            output_TAD,
            scaling / math.log(2),
            width,
            num_keys,
            num_tokens,
            query_TAD.stride(0),
            *keys_SHD.stride()[:2],
            NUM_QUERY_HEADS=num_query_heads,
            GROUP=group,
            TILE_HEADS=tile_heads,
            num_warps=4 if head_size <= NARROW_HEAD else 8,
            num_stages=2,
            **options_of(head_size),
        )
    return output_TAD


@triton.jit(
    do_not_specialize=("width", "num_keys", "num_tokens"),
    do_not_specialize_on_alignment=("slots", "seen", "stem_used"),
)
def attend_beside_stems_kernel(
    query,
    keys,
    values,
    slots,
    seen,
    stem_used,
    stem,
    stem_lse,
    output,
    scaling,
    width,
    num_keys,
    num_tokens,
    query_stride,
    key_stride,
    head_stride,
    NUM_QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (c, i, b) computes tile i of tree b, for column c of the heads."""
    TILE_TOKENS: tl.constexpr = ROWS // TILE_HEADS
    COLUMNS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    tree = tl.program_id(2)
    row_R = tl.arange(0, ROWS)
    dim_D = tl.arange(0, BLOCK_D)
    node_R = tl.program_id(1) * TILE_TOKENS + row_R // TILE_HEADS
    token_R = tree * width + node_R
    group_head_R = (tl.program_id(0) % COLUMNS) * TILE_HEADS + row_R % TILE_HEADS
    head = tl.program_id(0) // COLUMNS
    query_head_R = head * GROUP + group_head_R
    is_row_R = (row_R < TILE_TOKENS * TILE_HEADS) & (node_R < width) & (group_head_R < GROUP)
    inside_D = dim_D < HEAD_SIZE
    inside_RD = is_row_R[:, None] & inside_D[None, :]
    place_R = token_R.to(tl.int64) * NUM_QUERY_HEADS + query_head_R
    place_RD = place_R[:, None] * HEAD_SIZE + dim_D[None, :]
    query_RD = tl.load(
        query
        + token_R[:, None].to(tl.int64) * query_stride
        + query_head_R[:, None] * HEAD_SIZE
        + dim_D[None, :],
        mask=inside_RD,
        other=0.0,
    )
    own_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
    own_top_R = tl.full((ROWS,), -float("inf"), tl.float32)
    own_total_R = tl.zeros((ROWS,), tl.float32)
    for first in range(0, num_keys, BLOCK):
        key_K = first + tl.arange(0, BLOCK)
        inside_K = key_K < num_keys
        slot_K = tl.load(slots + tree.to(tl.int64) * num_keys + key_K, mask=inside_K, other=0)
        row_KD = slot_K[:, None].to(tl.int64) * key_stride + head * head_stride + dim_D[None, :]
        inside_KD = inside_K[:, None] & inside_D[None, :]
        keys_KD = tl.load(keys + row_KD, mask=inside_KD, other=0.0)
        scores_RK = tl.dot(query_RD, tl.trans(keys_KD)) * scaling
        sees_RK = tl.load(
            seen + token_R[:, None].to(tl.int64) * num_keys + key_K[None, :],
            mask=is_row_R[:, None] & inside_K[None, :],
            other=0,
        )
        scores_RK = tl.where(sees_RK != 0, scores_RK, -float("inf"))
        weights_RK, kept_R, own_top_R, own_total_R = weigh(scores_RK, own_top_R, own_total_R)
        values_KD = tl.load(values + row_KD, mask=inside_KD, other=0.0)
        own_RD = tl.dot(weights_RK.to(values_KD.dtype), values_KD, own_RD * kept_R[:, None])
    # A stem counts as one key whose score is its log-sum-exp.
    has_stem = tl.load(stem_used + tree) > 0
    read_R = is_row_R & has_stem
    stem_RD = tl.load(stem + place_RD, mask=read_R[:, None] & inside_D[None, :], other=0.0)
    lse_R = tl.load(
        stem_lse + query_head_R.to(tl.int64) * num_tokens + token_R,
        mask=read_R,
        other=-float("inf"),
    )
    outputs_RD, top_R, total_R = fold(
        stem_RD.to(tl.float32),
        lse_R / LN_2,
        tl.where(read_R, 1.0, 0.0),
        own_RD,
        own_top_R,
        own_total_R,
    )
    outputs_RD, lse_R = finish(outputs_RD, top_R, total_R)
    tl.store(output + place_RD, outputs_RD.to(output.dtype.element_ty), mask=inside_RD)
