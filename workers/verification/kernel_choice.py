"""The target's own tokens by Triton kernels: device_choice.py's arithmetic without its tensors.

Neither noise nor scores are written to memory (choice_kernels.py). Blocks of the vocabulary have
one size, whatever the number of rows, so that a row's bits depend on that row only. Import it only
where kernels can run.

Shapes: R rows, V vocabulary, P blocks of the vocabulary; the leading 2 is a pair of Philox words.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workers.process.kernels import on_device
from workers.verification.choice_kernels import (
    draw_kernel,
    draw_sorted_kernel,
    finish_kernel,
    likeliest_kernel,
    log_weights_kernel,
    weights_kernel,
)
from workers.verification.device_choice import RowParams
from workers.verification.noise_kernel import INTERPRETED

BLOCK = 2048
"""Number of tokens that one program processes."""

_OPTIONS = {"INTERPRETED": INTERPRETED, "num_warps": 4}


def choose_by_kernels(logits_RV: Tensor, rows: RowParams) -> tuple[Tensor, Tensor]:
    """choose_rows for adjusted logits: int32 and float32 [R].

    Takes 16 bytes per row and block of the vocabulary; with filters it also sorts each row.
    """
    with on_device(logits_RV.device):
        likeliest_RP = _likeliest(logits_RV)
        drawn_RP = None
        if rows.filters:
            drawn_RP = _draw_filtered(logits_RV, likeliest_RP, rows)
        elif rows.draws:
            drawn_RP = _draw(logits_RV, likeliest_RP, rows)
        return _finish(likeliest_RP, drawn_RP, rows)


def _likeliest(logits_RV: Tensor) -> Tensor:
    """The key [R, P] of the largest logit in each block."""
    keys_RP = _new_keys(logits_RV)
    likeliest_kernel[(keys_RP.numel(),)](
        logits_RV, logits_RV.stride(0), keys_RP, logits_RV.shape[1], BLOCK, num_warps=4
    )
    return keys_RP


def _draw(logits_RV: Tensor, likeliest_RP: Tensor, rows: RowParams) -> Tensor:
    """The key [R, P] of the best score in each block; for greedy rows nothing is written."""
    keys_RP = _new_keys(logits_RV)
    draw_kernel[(keys_RP.numel(),)](
        logits_RV,
        logits_RV.stride(0),
        likeliest_RP,
        rows.keys_2R,
        rows.keys_2R.stride(0),
        rows.positions_R,
        rows.sample_indices_R,
        rows.temperature_R,
        rows.greedy_R,
        keys_RP,
        logits_RV.shape[1],
        BLOCK,
        triton.next_power_of_2(keys_RP.shape[1]),
        **_OPTIONS,
    )
    return keys_RP


def _draw_filtered(logits_RV: Tensor, likeliest_RP: Tensor, rows: RowParams) -> Tensor:
    """As _draw, over the tokens that top-k, top-p and min-p keep, in blocks of ranks."""
    keys_RP = _new_keys(logits_RV)
    grid = (keys_RP.numel(),)
    padded = triton.next_power_of_2(keys_RP.shape[1])
    vocab_size = logits_RV.shape[1]
    log_weights_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
    log_weights_kernel[grid](
        logits_RV,
        logits_RV.stride(0),
        likeliest_RP,
        rows.temperature_R,
        log_weights_RV,
        vocab_size,
        BLOCK,
        padded,
        num_warps=4,
    )
    # Stable: among tokens that tie, the lowest ids come first.
    sorted_RV, ids_RV = log_weights_RV.sort(dim=1, descending=True, stable=True)
    weights_RV = torch.empty_like(sorted_RV, dtype=torch.float64)
    weights_kernel[grid](sorted_RV, rows.top_k_R, weights_RV, vocab_size, BLOCK, **_OPTIONS)
    wanted_R1 = rows.top_p_R[:, None] * weights_RV.sum(dim=1, keepdim=True)
    num_below_R = (weights_RV.cumsum(dim=1) < wanted_R1).sum(dim=1)
    draw_sorted_kernel[grid](
        sorted_RV,
        ids_RV,
        rows.keys_2R,
        rows.keys_2R.stride(0),
        rows.positions_R,
        rows.sample_indices_R,
        rows.top_k_R,
        rows.top_p_R,
        num_below_R,
        rows.log_min_p_R,
        keys_RP,
        vocab_size,
        BLOCK,
        **_OPTIONS,
    )
    return keys_RP


def _finish(
    likeliest_RP: Tensor, drawn_RP: Tensor | None, rows: RowParams
) -> tuple[Tensor, Tensor]:
    """Ids and largest logits [R], from the best of each block."""
    num_rows, num_blocks = likeliest_RP.shape
    token_ids_R = torch.empty(num_rows, dtype=torch.int32, device=likeliest_RP.device)
    largest_R = torch.empty(num_rows, dtype=torch.float32, device=likeliest_RP.device)
    finish_kernel[(num_rows,)](
        likeliest_RP,
        likeliest_RP if drawn_RP is None else drawn_RP,
        rows.greedy_R,
        token_ids_R,
        largest_R,
        num_blocks,
        triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
    return token_ids_R, largest_R


def _new_keys(logits_RV: Tensor) -> Tensor:
    """Uninitialized int64 [R, P]."""
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.dtype == torch.float32, logits_RV.dtype
    assert logits_RV.stride(1) == 1, logits_RV.stride()
    shape = (num_rows, triton.cdiv(vocab_size, BLOCK))
    return torch.empty(shape, dtype=torch.int64, device=logits_RV.device)
