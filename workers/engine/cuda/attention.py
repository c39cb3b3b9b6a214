"""Attention over pages: torch's kernel, our own, or a plain reference where no kernel can run.

- torch's varlen_attn (FlashAttention 2) is for float16 and bfloat16 on CUDA devices from Ampere on.
  Here it never divides the keys of one sequence among thread blocks.
- Our own kernel (attention_kernel.py) takes its place if our kernels run (process/kernels.py). It
  does divide the keys.
- The reference computes the same, sequence by sequence: for float32, and in tests on a CPU.

Our own kernel and the reference also read pages of float8, and widen them to the queries' dtype.
The kernel multiplies scores by the scale of the keys, and outputs by that of the values.

The tokens of a slice with a tree see keys in slots that are not those of their positions. Each
token has a list of such slots. The keys before them, which all tokens of the slice see, are whole
blocks of its pages. With our own kernels (tree_kernel.py), such a token has the bits that it has in
a chain. Otherwise the two parts are computed apart and merged by log-sum-exp, which gives other
bits.

Shapes: T tokens, A query heads, H key/value heads, D head size, B sequences, P pages of a table, W
queries of a slice, K slots of a path, S slots in all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from workers.engine.cuda.kv_cache import PAGE_SIZE, LayerPages, widened
from workers.process.kernels import AMPERE, can_run_kernels

_LARGEST_HEAD = 256
_HEAD_MULTIPLE = 8
_HAS_BLOCK_TABLES = "block_table" in inspect.signature(varlen_attn).parameters
_ONE_SPLIT = 1
"""The `num_splits` of varlen_attn: the keys of a sequence are not divided among thread blocks. With
a division, torch 2.13 leaves the rows of all sequences but the first unwritten (pytorch issue
194167). The division, and with it the bits, would also depend on the batch.
"""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Sequences of different lengths, their tokens packed one sequence after another.

    Sequence b's queries are tokens `cu_seq_B[b]` to `cu_seq_B[b + 1]`. It has `used_B[b]` keys, in
    the pages of row b of `table_BP`. All tensors are int32. `max_width`: no sequence has more
    tokens. `lengths`: (queries, keys) of each sequence, on the host; only the reference reads
    them.
    """

    cu_seq_B: Tensor
    used_B: Tensor
    table_BP: Tensor
    max_width: int
    lengths: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Trees:
    """Slices whose tokens do not all see each other, packed one after another.

    `shared`: the keys that all tokens of a slice see, as whole blocks of KEY_BLOCK. Token t also
    sees the first `counts_T[t]` of `slots_TK[t]`, at least one, in the order of their positions.
    All tensors are int32.
    """

    shared: Ragged
    slots_TK: Tensor
    counts_T: Tensor


def can_use_kernel(
    device: torch.device, dtype: torch.dtype, head_size: int, kv_dtype: torch.dtype | None = None
) -> bool:
    """Whether kernels support such tensors. varlen_attn and our kernels support the same ones.

    Without our kernels, pages must have the queries' dtype (`kv_dtype` None), and torch's
    varlen_attn must have block tables. That of torch 2.11 has none.
    """
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_size % _HEAD_MULTIPLE == 0
        and head_size <= _LARGEST_HEAD
        and _has_kernel(device)
        and ((_HAS_BLOCK_TABLES and kv_dtype in (None, dtype)) or can_run_kernels(device))
    )


def _can_use_our_kernel(query_TAD: Tensor) -> bool:
    device, dtype, head_size = query_TAD.device, query_TAD.dtype, query_TAD.shape[2]
    return can_use_kernel(device, dtype, head_size) and can_run_kernels(device)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    available = torch.backends.cuda.is_flash_attention_available()
    return available and torch.cuda.get_device_capability(device) >= AMPERE


def attend(
    query_TAD: Tensor,
    layer: LayerPages,
    ragged: Ragged,
    scaling: float,
    *,
    causal: bool,
    input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [T, A, D], and float32 log-sum-exps of the scores [A, T].

    `causal`: a sequence's last query sees all its keys, and each query before it one key less.
    Otherwise all queries see all keys. For queries without keys, both results are unspecified. A
    query's bits depend on its own keys only. `input_scale`: that of the product which takes the
    outputs; our own kernel then stores them in float8.
    """
    kv_dtype = layer.keys_NPHD.dtype
    if not can_use_kernel(query_TAD.device, query_TAD.dtype, query_TAD.shape[2], kv_dtype):
        return attend_by_reference(query_TAD, layer, ragged, scaling, causal=causal)
    if can_run_kernels(query_TAD.device):
        from workers.engine.cuda.attention_kernel import attend_pages

        return attend_pages(
            query_TAD,
            layer,
            ragged.cu_seq_B,
            ragged.used_B,
            ragged.table_BP,
            scaling,
            causal=causal,
            input_scale=input_scale,
        )
    result = varlen_attn(
        query_TAD,
        layer.keys_NPHD,
        layer.values_NPHD,
        ragged.cu_seq_B,
        # Required, but without effect: `seqused_k` and `block_table` determine the keys.
        ragged.cu_seq_B,
        # At least 2: with 1 the kernel would put the heads of a group into the rows of a tile.
        max(2, ragged.max_width),
        ragged.table_BP.shape[1] * PAGE_SIZE,
        return_aux=AuxRequest(lse=True),
        scale=scaling,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=True,
        seqused_k=ragged.used_B,
        block_table=ragged.table_BP,
        num_splits=_ONE_SPLIT,
    )
    assert isinstance(result, tuple), "varlen_attn was asked for log-sum-exps"
    return result


def attend_by_reference(
    query_TAD: Tensor, layer: LayerPages, ragged: Ragged, scaling: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """As `attend`, sequence by sequence, in float32 on any device."""
    output_TAD = torch.zeros_like(query_TAD)
    lse_AT = query_TAD.new_zeros((query_TAD.shape[1], query_TAD.shape[0]), dtype=torch.float32)
    first = 0
    for table_P, (num_queries, num_keys) in zip(ragged.table_BP, ragged.lengths, strict=True):
        tokens = slice(first, first + num_queries)
        first += num_queries
        if num_keys == 0:
            continue
        pages = table_P[: -(-num_keys // PAGE_SIZE)].to(torch.int64)
        keys_KHD, values_KHD = (
            widened(one.index_select(0, pages).flatten(0, 1)[:num_keys], scales_H)
            for one, scales_H in zip(
                (layer.keys_NPHD, layer.values_NPHD), layer.scales, strict=True
            )
        )
        seen_QK = query_TAD.new_ones((num_queries, num_keys), dtype=torch.bool)
        if causal:
            seen_QK = seen_QK.tril(num_keys - num_queries)
        output, lse = masked_attention(
            query_TAD[None, tokens], keys_KHD[None], values_KHD[None], seen_QK, scaling
        )
        output_TAD[tokens] = output[0]
        lse_AT[:, tokens] = lse[0].T
    return output_TAD, lse_AT


def attend_trees(
    query_TAD: Tensor,
    layer: LayerPages,
    trees: Trees,
    scaling: float,
    input_scale: Tensor | None = None,
) -> Tensor:
    """Outputs [T, A, D] of the packed tokens of slices with trees.

    `input_scale`: as in `attend`.
    """
    shared = trees.shared
    if _can_use_our_kernel(query_TAD):
        from workers.engine.cuda.tree_kernel import attend_paths

        return attend_paths(
            query_TAD,
            layer,
            shared.cu_seq_B,
            shared.used_B,
            shared.table_BP,
            trees.slots_TK,
            trees.counts_T,
            scaling,
            input_scale=input_scale,
        )
    num_tokens, num_slots = trees.slots_TK.shape
    shared_TAD, shared_lse_AT = attend(query_TAD, layer, shared, scaling, causal=False)
    slots = trees.slots_TK.flatten()
    keys_TKHD, values_TKHD = (
        widened(one.index_select(0, slots).view(num_tokens, num_slots, *one.shape[1:]), scales_H)
        for one, scales_H in zip((layer.keys_SHD, layer.values_SHD), layer.scales, strict=True)
    )
    numbers_K = torch.arange(num_slots, device=slots.device)
    seen_T1K = (numbers_K < trees.counts_T[:, None])[:, None]
    own_T1AD, own_lse_T1A = masked_attention(
        query_TAD[:, None], keys_TKHD, values_TKHD, seen_T1K, scaling
    )
    tokens_T = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
    slice_T = torch.searchsorted(shared.cu_seq_B[1:], tokens_T, right=True)
    sees_T1 = shared.used_B.index_select(0, slice_T)[:, None] > 0
    shared_lse_TA = torch.where(sees_T1, shared_lse_AT.T, -torch.inf)
    shared_TAD = torch.where(sees_T1[..., None], shared_TAD, 0.0)
    # The part of the weights that the shared keys have; the path's keys have the rest.
    part_TA1 = torch.sigmoid(shared_lse_TA - own_lse_T1A[:, 0])[..., None]
    merged_TAD = shared_TAD * part_TA1 + own_T1AD[:, 0] * (1 - part_TA1)
    return merged_TAD.to(query_TAD.dtype)


def masked_attention(
    query_BWAD: Tensor, keys_BKHD: Tensor, values_BKHD: Tensor, seen_BWK: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Float32 outputs [B, W, A, D] and log-sum-exps [B, W, A], computed in float32.

    `seen_BWK` may lack B and then holds for all slices. Query head a uses key head a // (A / H).
    The outputs of a query that sees no key are 0.
    """
    num_slices, width, num_query_heads, head_size = query_BWAD.shape
    num_heads = keys_BKHD.shape[2]
    query = query_BWAD.to(torch.float32).view(num_slices, width, num_heads, -1, head_size)
    scores = torch.einsum("bwhgd,bkhd->bwhgk", query, keys_BKHD.to(torch.float32)) * scaling
    scores = scores.masked_fill(~seen_BWK[..., :, None, None, :], -torch.inf)
    lse = scores.logsumexp(dim=-1)
    weights = torch.where(scores > -torch.inf, (scores - lse[..., None]).exp(), 0.0)
    output = torch.einsum("bwhgk,bkhd->bwhgd", weights, values_BKHD.to(torch.float32))
    shape = (num_slices, width, num_query_heads)
    return output.reshape(*shape, head_size), lse.reshape(shape)
