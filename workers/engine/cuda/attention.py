"""Attention over pages: torch's kernel, our own, or a plain reference where no kernel can run.

- torch's varlen_attn (FlashAttention 2) is for float16 and bfloat16 on CUDA devices from Ampere on.
  Here it never divides the keys of one sequence among thread blocks.
- Our own kernel (attention_kernel.py) takes its place if our kernels run (process/kernels.py). It
  does divide the keys.
- The reference computes the same, sequence by sequence: for float32, and in tests on a CPU.

A tree's nodes need a mask, which neither kernel supports. So the attention of a slice with a tree
has two parts, which are merged by log-sum-exp. The first part is over the stem: the keys that all
of the slice's tokens see. It is computed as above. The second part is over the other keys: those of
the tree, and of tokens before the tree that are fed with it. It has a mask, and is computed by
plain products or by another kernel of ours (tree_kernel.py).

Shapes: T tokens, A query heads, H key/value heads, D head size, B sequences, P pages of a table, W
tokens of a tree's slice, K keys beside the stem, S slots.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from workers.engine.cuda.kv_cache import PAGE_SIZE, LayerPages
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
    the pages of row b of `table_BP`. All tensors are int32. `max_width`: the most tokens in one
    sequence. `lengths`: (queries, keys) of each sequence, on the host; only the reference reads
    them.
    """

    cu_seq_B: Tensor
    used_B: Tensor
    table_BP: Tensor
    max_width: int
    lengths: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Trees:
    """Slices of one width whose tokens do not all see each other.

    `stem`: the keys that all of a slice's tokens see. Of the slots `key_slots_BK`, token w sees
    those where `seen_BWK` is True, at least one.
    """

    stem: Ragged
    key_slots_BK: Tensor
    seen_BWK: Tensor


def can_use_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether kernels support such tensors. varlen_attn and our kernels support the same ones.

    Without our kernels, torch's varlen_attn must have block tables. That of torch 2.11 has none.
    """
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_size % _HEAD_MULTIPLE == 0
        and head_size <= _LARGEST_HEAD
        and _has_kernel(device)
        and (_HAS_BLOCK_TABLES or can_run_kernels(device))
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
) -> tuple[Tensor, Tensor]:
    """Outputs [T, A, D], and float32 log-sum-exps of the scores [A, T].

    `causal`: a sequence's last query sees all its keys, and each query before it one key less.
    Otherwise all queries see all keys. For queries without keys, both results are unspecified. A
    query's bits depend on its own keys only.
    """
    if not can_use_kernel(query_TAD.device, query_TAD.dtype, query_TAD.shape[2]):
        return _reference(query_TAD, layer, ragged, scaling, causal=causal)
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


def _reference(
    query_TAD: Tensor, layer: LayerPages, ragged: Ragged, scaling: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
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
            one.index_select(0, pages).flatten(0, 1)[:num_keys]
            for one in (layer.keys_NPHD, layer.values_NPHD)
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


def attend_trees(query_TAD: Tensor, layer: LayerPages, trees: Trees, scaling: float) -> Tensor:
    """Outputs [T, A, D] of the slices' packed tokens; T = B x W."""
    num_trees, width, num_keys = trees.seen_BWK.shape
    stem_TAD, stem_lse_AT = attend(query_TAD, layer, trees.stem, scaling, causal=False)
    if _can_use_our_kernel(query_TAD):
        from workers.engine.cuda.tree_kernel import attend_beside_stems

        return attend_beside_stems(
            query_TAD,
            layer,
            trees.key_slots_BK,
            trees.seen_BWK,
            stem_TAD,
            stem_lse_AT,
            trees.stem.used_B,
            scaling,
        )
    slots = trees.key_slots_BK.flatten()
    keys_BKHD, values_BKHD = (
        one.index_select(0, slots).view(num_trees, num_keys, *one.shape[1:])
        for one in (layer.keys_SHD, layer.values_SHD)
    )
    query_BWAD = query_TAD.view(num_trees, width, *query_TAD.shape[1:])
    own_BWAD, own_lse_BWA = masked_attention(
        query_BWAD, keys_BKHD, values_BKHD, trees.seen_BWK, scaling
    )
    has_stem_B11 = (trees.stem.used_B > 0)[:, None, None]
    stem_lse_BWA = stem_lse_AT.T.reshape(own_lse_BWA.shape)
    stem_lse_BWA = torch.where(has_stem_B11, stem_lse_BWA, -torch.inf)
    stem_BWAD = torch.where(has_stem_B11[..., None], stem_TAD.view(query_BWAD.shape), 0.0)
    # The stem's share of the weights; the second part has the rest.
    share_BWA1 = torch.sigmoid(stem_lse_BWA - own_lse_BWA)[..., None]
    merged_BWAD = stem_BWAD * share_BWA1 + own_BWAD * (1 - share_BWA1)
    return merged_BWAD.to(query_TAD.dtype).view(query_TAD.shape)


def masked_attention(
    query_BWAD: Tensor, keys_BKHD: Tensor, values_BKHD: Tensor, seen_BWK: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Float32 outputs [B, W, A, D] and log-sum-exps [B, W, A], computed in float32.

    `seen_BWK` may lack B and then holds for all slices. Query head a uses key head a // (A / H).
    """
    num_slices, width, num_query_heads, head_size = query_BWAD.shape
    num_heads = keys_BKHD.shape[2]
    query = query_BWAD.to(torch.float32).view(num_slices, width, num_heads, -1, head_size)
    scores = torch.einsum("bwhgd,bkhd->bwhgk", query, keys_BKHD.to(torch.float32)) * scaling
    scores = scores.masked_fill(~seen_BWK[..., :, None, None, :], -torch.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp()
    output = torch.einsum("bwhgk,bkhd->bwhgd", weights, values_BKHD.to(torch.float32))
    shape = (num_slices, width, num_query_heads)
    return output.reshape(*shape, head_size), lse.reshape(shape)
