"""Attention over paged KV on a CPU, and the step that computes it.

A query row attends to chunks of 128 positions, one by one. The bounds of chunks are fixed, absolute
positions. The results of the chunks are merged in order of position, weighted by log-sum-exp. A
chunk that a row must not see gets a weight of exactly 0. So a row's bits depend on its own prefix
only, not on the window, the batch, or the way in which the prompt was split.

Shapes: B slices of a group, C chunks, H key/value heads, R query rows, D head size, A all heads of
a token: its queries, keys and values (step_plan.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.engine.cpu.kv_cache import LayerCache
from workers.engine.cpu.step_plan import SliceGroup, StepPlan


class CpuStep:
    """A step on a CPU (forward.Step): its plan and the KV buffers."""

    __slots__ = ("layers", "logit_rows", "plan", "position_ids_T", "token_ids_T")

    def __init__(self, plan: StepPlan, layers: list[LayerCache]) -> None:
        self.plan = plan
        self.layers = layers
        self.token_ids_T = plan.token_ids_T
        self.position_ids_T = plan.position_ids_T
        self.logit_rows = plan.logit_rows

    def attend(
        self,
        rows_TAD: Tensor,
        layer: int,
        scaling: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        _store(rows_TAD, self.plan, self.layers[layer])
        groups = self.plan.groups_of(window)
        rows = rows_TAD.view(-1, rows_TAD.shape[2])
        outputs = [_attend(group, rows, self.layers[layer], scaling, softcap) for group in groups]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, self.plan.scatter)


def _store(rows_TAD: Tensor, plan: StepPlan, layer: LayerCache) -> None:
    num_written = layer.slots_2HSD.shape[0]
    written = rows_TAD[: plan.num_tokens, -num_written:].transpose(0, 1)
    if plan.slots_T is None:
        layer.slots_2HSD.narrow(1, plan.first_slot, plan.num_tokens).copy_(written)
    else:
        layer.slots_2HSD.index_copy_(1, plan.slots_T, written)


def _attend(
    group: SliceGroup, rows: Tensor, layer: LayerCache, scaling: float, softcap: float | None
) -> Tensor:
    """Attention of a group's query rows: [B x H x R, D]."""
    num_heads, head_size = layer.keys_NHBD.shape[1], rows.shape[1]
    query_BHRD = rows.index_select(0, group.gather).view(
        group.num_slices, num_heads, group.num_rows, head_size
    )
    parts: list[Tensor] = []
    weights: list[Tensor] = []
    for run in group.runs:
        first, end = run.first_block, run.first_block + run.count
        if run.slices_C is None:
            run_query = query_BHRD[run.slice_index].expand(run.count, -1, -1, -1)
        else:
            run_query = query_BHRD.index_select(0, run.slices_C)
        keys, values = layer.keys_NHBD[first:end], layer.values_NHBD[first:end]
        if softcap is None:
            part_CHRD, lse_CHR = torch._scaled_dot_product_flash_attention_for_cpu(
                run_query, keys, values, 0.0, False, attn_mask=run.mask_CR, scale=scaling
            )
        else:
            part_CHRD, lse_CHR = _capped(run_query, keys, values, run.mask_CR, scaling, softcap)
        parts.append(part_CHRD)
        weights.append(lse_CHR)
    parts_CHRD = parts[0] if len(parts) == 1 else torch.cat(parts)
    if group.spread is not None:
        parts_CHRD = parts_CHRD.index_select(0, group.spread)
    if group.max_chunks == 1:
        return parts_CHRD.reshape(-1, head_size)
    lse_CHR = weights[0] if len(weights) == 1 else torch.cat(weights)
    if group.spread is not None:
        lse_CHR = lse_CHR.index_select(0, group.spread)
    merged_BHRD = _merge(group, parts_CHRD, lse_CHR)
    return merged_BHRD.to(rows.dtype).view(-1, head_size)


def _capped(
    query_CHRD: Tensor,
    keys_CHBD: Tensor,
    values_CHBD: Tensor,
    mask_CR: Tensor,
    scaling: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """As torch's kernel, but with scores kept within `softcap`, for which it has no option."""
    scores_CHRB = torch.matmul(query_CHRD, keys_CHBD.transpose(2, 3)).float() * scaling
    scores_CHRB = torch.tanh(scores_CHRB / softcap) * softcap + mask_CR
    lse_CHR = torch.logsumexp(scores_CHRB, dim=-1)
    weights_CHRB = torch.exp(scores_CHRB - lse_CHR.unsqueeze(-1)).to(values_CHBD.dtype)
    return torch.matmul(weights_CHRB, values_CHBD), lse_CHR


def _merge(group: SliceGroup, parts_CHRD: Tensor, lse_CHR: Tensor) -> Tensor:
    """Merge the chunks of each slice, B x max_chunks, in order of position: [B, H, R, D]."""
    shape = (group.num_slices, group.max_chunks, *lse_CHR.shape[1:])
    lse_BCHR = lse_CHR.view(shape)
    if group.absent_BC is not None:
        lse_BCHR = lse_BCHR + group.absent_BC
    weight_BCHR = (lse_BCHR - lse_BCHR.amax(dim=1, keepdim=True)).exp_()
    # A running sum adds in order. A plain sum may add pairwise, depending on the count.
    share_BCHR = weight_BCHR.div_(weight_BCHR.cumsum(dim=1)[:, -1:])
    weighted_BCHRD = parts_CHRD.view(*shape, -1) * share_BCHR.unsqueeze(-1)
    merged_BHRD = weighted_BCHRD[:, 0].contiguous()
    for chunk in range(1, group.max_chunks):
        merged_BHRD += weighted_BCHRD[:, chunk]
    return merged_BHRD
