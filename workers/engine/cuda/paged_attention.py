"""Attention over pages in Triton: a sequence's keys are shared among programs, with fixed bits.

A sequence's keys are cut into units (attention_units.py). The rows of a tile attend to each unit
separately; a row's units are then folded in order, first to last. With many tiles (prefill, large
batches) a program folds the units as it computes them. With few tiles (decoding) programs store the
result of each unit, and a second kernel folds them. The operations on a row are the same in both
cases, so that its bits depend on its own keys only. For the same reason all tiles have one size,
and products and sums are never contracted (`enable_fp_fusion=False`).

Import it only where kernels can run. Shapes: T tokens, A query heads, H key/value heads, D head
size, B sequences, P pages of a table, N pages in all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from workers.engine.cuda.attention_kernel import ROWS, attend_kernel, fold_stored_kernel
from workers.engine.cuda.attention_units import num_units, share_out
from workers.engine.cuda.kv_cache import PAGE_SIZE, LayerPages
from workers.process.kernels import on_device

SCRATCH_BYTES = 256 << 20
"""Memory for stored units. Steps that would need more fold as they go."""
NARROW_HEAD = 128
"""Up to this head size four warps hold a tile's sums, and three blocks fit into shared memory."""


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
) -> tuple[Tensor, Tensor]:
    """As `attention.attend`: outputs [T, A, D] of the queries' dtype, float32 log-sum-exps [A, T].

    Both are zero for rows without keys. `scratch_bytes` changes how the result is computed, but not
    its bits.
    """
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
    output_TAD = torch.empty(query_TAD.shape, dtype=query_TAD.dtype, device=query_TAD.device)
    lse_AT = query_TAD.new_empty((num_query_heads, num_tokens), dtype=torch.float32)
    programs = share_out(
        units,
        num_tiles * num_columns,
        unit_bytes=4 * num_tokens * num_query_heads * (head_size + 2),
        scratch_bytes=scratch_bytes,
    )
    folds = programs == 1
    if folds:
        # The kernel does not access them.
        unit_outputs = unit_sums = lse_AT
    else:
        rows = (units, num_tokens, num_query_heads)
        unit_outputs = lse_AT.new_empty((*rows, head_size))
        unit_sums = lse_AT.new_empty((2, *rows))
    shape = options_of(head_size)
    with on_device(query_TAD.device):
        attend_kernel[(num_columns, programs, num_tiles)](
            query_TAD,
            keys_NPHD,
            values_NPHD,
            cu_seq_B,
            used_B,
            table_BP,
            output_TAD,
            lse_AT,
            unit_outputs,
            unit_sums,
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
                output_TAD,
                lse_AT,
                int(causal),
                num_sequences,
                num_tokens,
                units * num_tokens * num_query_heads,
                NUM_QUERY_HEADS=num_query_heads,
                num_warps=1,
                **shape,
            )
    return output_TAD, lse_AT


def options_of(head_size: int) -> dict[str, Any]:
    """The options with which every attention kernel is compiled for heads of this size."""
    return {
        "HEAD_SIZE": head_size,
        "BLOCK_D": max(16, triton.next_power_of_2(head_size)),
        "enable_fp_fusion": False,
    }
