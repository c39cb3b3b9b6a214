"""The target's own tokens for many rows at once, on the device that has their logits.

The arithmetic and its order are those of distribution.py and choice.py, on tensors. No step depends
on a value, so the host never waits. The ids are equal to theirs, unless two scores differ only by
the rounding of exp or log. torch computes it, or our kernels where they run (kernel_choice.py).

Shapes: R rows, V vocabulary, E entries of sparse changes, S entries that texts share, M tokens that
are ruled out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.process.kernels import can_run_kernels
from workers.verification.device_noise import gumbel_noise_RV

_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes to the logits of E tokens, in order: the bias is added, the logit is divided by
    the repetition penalty (multiplied if negative), and `subtracted_E` is subtracted.
    """

    bias_E: Tensor
    repetition_E: Tensor
    subtracted_E: Tensor

    def at(self, places: Tensor) -> Changes:
        """The changes at these places, in order."""
        return Changes(self.bias_E[places], self.repetition_E[places], self.subtracted_E[places])


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Bias and penalties of single tokens, and tokens that are ruled out.

    The rows of a text share its changes: row r has `count_R[r]` of `text_ids_S`, from `first_R[r]`
    on; all rows together have `num_shared`. For tokens on a row's own path, the changes in `own`
    apply instead. `own_2E` and `masked_2M` are (row, token id). No token comes twice in a row.
    """

    text_ids_S: Tensor
    text: Changes
    first_R: Tensor
    count_R: Tensor
    num_shared: int
    own_2E: Tensor
    own: Changes
    masked_2M: Tensor


@dataclass(frozen=True, slots=True)
class RowParams:
    """The parameters of each row's distribution and noise; all tensors are on the logits' device.

    A filter is off if `top_k_R` is V or more, `top_p_R` (float64) is 1, `log_min_p_R` is -inf.
    Greedy rows have a temperature of 1. `draws`: some row is not greedy; `filters`: some row has
    top-k, top-p or min-p. The host knows both and uses them to skip work.
    """

    greedy_R: Tensor
    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    log_min_p_R: Tensor
    keys_2R: Tensor
    positions_R: Tensor
    sample_indices_R: Tensor
    draws: bool
    filters: bool
    adjustments: Adjustments | None = None


def choose_rows(logits_RV: Tensor, rows: RowParams) -> tuple[Tensor, Tensor]:
    """The token of each row (int32 [R]), and the largest adjusted logit (float32 [R]).

    A row whose largest logit is not finite has no token: the caller must check it with
    distribution.check_likeliest. `logits_RV` is float32 and is not changed.
    """
    if rows.adjustments is not None:
        logits_RV = _adjust(logits_RV, rows.adjustments)
    if can_run_kernels(logits_RV.device):
        from workers.verification.kernel_choice import choose_by_kernels

        return choose_by_kernels(logits_RV, rows)
    return choose_by_torch(logits_RV, rows)


def choose_by_torch(logits_RV: Tensor, rows: RowParams) -> tuple[Tensor, Tensor]:
    """choose_rows for adjusted logits, on any device. Allocates noise and scores [R, V]."""
    largest_R, likeliest_R = logits_RV.max(dim=1)
    if not rows.draws:
        return likeliest_R.to(torch.int32), largest_R
    log_weights_RV = (logits_RV - largest_R[:, None]) / rows.temperature_R[:, None]
    scores_RV = log_weights_RV + gumbel_noise_RV(
        rows.keys_2R, rows.positions_R, rows.sample_indices_R, vocab_size=logits_RV.shape[1]
    )
    if rows.filters:
        scores_RV = scores_RV.masked_fill_(~_kept(log_weights_RV, rows), -torch.inf)
    chosen_R = torch.where(rows.greedy_R, likeliest_R, scores_RV.argmax(dim=1))
    return chosen_R.to(torch.int32), largest_R


def _adjust(logits_RV: Tensor, changes: Adjustments) -> Tensor:
    logits_RV = logits_RV.clone()
    own_row_E, own_id_E = changes.own_2E
    before_E = logits_RV[own_row_E, own_id_E]
    if changes.num_shared:
        count_R = changes.count_R
        rows = torch.arange(count_R.numel(), device=count_R.device)
        row_E = torch.repeat_interleave(rows, count_R, output_size=changes.num_shared)
        # The distance from a row's first entry here to its first one among the texts' changes.
        shift_R = changes.first_R - (count_R.cumsum(0) - count_R)
        place_E = torch.arange(changes.num_shared, device=count_R.device) + shift_R[row_E]
        id_E = changes.text_ids_S[place_E]
        logits_RV[row_E, id_E] = _changed(logits_RV[row_E, id_E], changes.text.at(place_E))
    if changes.own_2E.numel():
        logits_RV[own_row_E, own_id_E] = _changed(before_E, changes.own)
    if changes.masked_2M.numel():
        masked_row_M, masked_id_M = changes.masked_2M
        ruled_out_M = torch.full_like(masked_id_M, -torch.inf, dtype=logits_RV.dtype)
        logits_RV.index_put_((masked_row_M, masked_id_M), ruled_out_M)
    return logits_RV


def _changed(values_E: Tensor, changes: Changes) -> Tensor:
    """Each step is capped at the largest float32: a huge bias must not become infinite."""
    values_E = (values_E + changes.bias_E).clamp_max(_FLOAT32.max)
    penalty_E = changes.repetition_E
    values_E = torch.where(values_E < 0, values_E * penalty_E, values_E / penalty_E)
    values_E = values_E.clamp_max_(_FLOAT32.max) - changes.subtracted_E
    return values_E.clamp_max_(_FLOAT32.max)


def _kept(log_weights_RV: Tensor, rows: RowParams) -> Tensor:
    """The tokens that top-k, top-p and min-p keep, in this order: bool [R, V]."""
    vocab_size = log_weights_RV.shape[1]
    # Stable: among tokens that tie, the lowest ids come first.
    sorted_RV, ids_RV = log_weights_RV.sort(dim=1, descending=True, stable=True)
    kth_R1 = sorted_RV.gather(1, (rows.top_k_R.clamp_max(vocab_size) - 1)[:, None])
    kept_RV = sorted_RV >= kth_R1
    weights_RV = torch.where(kept_RV, sorted_RV.exp(), 0.0).to(torch.float64)
    sums_RV = weights_RV.cumsum(dim=1)
    wanted_R1 = rows.top_p_R[:, None] * weights_RV.sum(dim=1, keepdim=True)
    num_kept_R1 = (sums_RV < wanted_R1).sum(dim=1, keepdim=True) + 1
    rank_V = torch.arange(vocab_size, device=log_weights_RV.device)
    kept_RV &= (rank_V < num_kept_R1) | (rows.top_p_R[:, None] >= 1.0)
    kept_RV &= sorted_RV >= rows.log_min_p_R[:, None]
    return torch.zeros_like(kept_RV).scatter_(1, ids_RV, kept_RV)
