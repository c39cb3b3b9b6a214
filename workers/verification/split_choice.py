"""The target's own tokens, chosen by ranks that have the logits of one part of the vocabulary each.

All ranks get the tokens that one rank chooses from whole rows (device_choice.py), bit for bit:

- Bias, penalties and min_tokens change single logits, so each rank changes those of its part.
- The largest logit of a row is the largest of all parts. It is exchanged as a key, an integer that
  orders by value first, and then by token id, the lowest first.
- A score depends on its token's logit and noise, and on the row's largest logit. So each rank finds
  the best score of its part, and the best of all parts is exchanged as a key, too.
- Top-k, top-p and min-p need the weights of a whole row in order. The ranks share the rows that
  have such filters: each gets some of them whole, chooses their tokens alone, and gives the token
  as a key to the second exchange.

Rows that follow a structure are not chosen here: only rank 0 has their masks.

Shapes: R rows, V vocabulary, N columns of a rank, S rows of a rank's share, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.sampling import SamplingParams, SequenceSpec
from workers.process.kernels import can_run_kernels
from workers.verification.device_choice import (
    ROWS_AT_ONCE,
    Row,
    RowParams,
    adjusted,
    choose_rows,
    filters,
    gumbel_noise_RV,
    needs_room,
    pack_rows,
    params_of,
)
from workers.verification.staging import to_device, to_host

_LOWEST_KEY = -(2**63)
_LARGEST_ID = 2**31 - 1
_NAN_BITS = 0x7FC00000


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """A rank's part of the vocabulary, and its exchanges with the other ranks.

    `token_ids`: those of the first columns of its logits, the first a multiple of LANES; further
    columns are padding. All ranks have the same number of columns, so the columns of all ranks, in
    their order, are those of the vocabulary and then padding. `gather` maps a rank's int64 [R] to
    those of all ranks, [W, R]. `share_out` maps columns of rows to whole rows: rank r gets the rows
    from r * S on, S = R / W rounded up.
    """

    token_ids: range
    vocab_size: int
    rank: int
    gather: Callable[[Tensor], Tensor]
    share_out: Callable[[Tensor], Tensor]


def choose_in_parts(
    logits_RN: Tensor, rows: Sequence[Row], part: VocabularyPart
) -> tuple[Tensor, Tensor]:
    """As device_choice.choose_tokens, on each rank. All ranks must call it with the same rows."""
    spares = can_run_kernels(logits_RN.device) and not needs_room(rows, part.vocab_size)
    size = len(rows) if spares else ROWS_AT_ONCE
    chosen = [
        _choose(logits_RN[first : first + size], rows[first : first + size], part)
        for first in range(0, len(rows), size)
    ]
    token_ids, largest = zip(*chosen, strict=True)
    return torch.cat(token_ids), torch.cat(largest)


def make_ready(held: range, vocab_size: int, device: torch.device) -> None:
    """As device_choice.make_ready, for a rank with these token ids. It needs no other rank."""
    part = VocabularyPart(
        held,
        vocab_size,
        rank=0,
        gather=lambda keys_R: keys_R[None],
        share_out=lambda rows_RN: rows_RN.new_zeros(rows_RN.shape[0], vocab_size),
    )
    logits_1N = torch.zeros(1, len(held), device=device)
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)):
        row = Row(SequenceSpec(sampling, seed=0, prompt_length=1), [0])
        to_host(*choose_in_parts(logits_1N, [row], part))


def _choose(logits_RN: Tensor, rows: Sequence[Row], part: VocabularyPart) -> tuple[Tensor, Tensor]:
    device, held = logits_RN.device, part.token_ids
    params = pack_rows(rows, vocab_size=part.vocab_size, device=device, held=held)
    logits_RN = adjusted(logits_RN, params)
    held_RN = logits_RN[:, : len(held)]
    likeliest_R = part.gather(_likeliest(held_RN, held.start)).amax(dim=0)
    largest_R = values_of(likeliest_R)
    if not params.draws:
        return ids_of(likeliest_R), largest_R
    drawn_R = _draw(held_RN, likeliest_R, params, held.start)
    if params.filters:
        filtered = [i for i, row in enumerate(rows) if filters(row.spec.sampling, part.vocab_size)]
        places = to_device(np.array(filtered), device)
        keys_F = _choose_share(logits_RN[places], [rows[i] for i in filtered], part)
        drawn_R = drawn_R.index_copy(0, places, keys_F)
    drawn_R = part.gather(drawn_R).amax(dim=0)
    # If a row has no token, its largest logit is the reason, and is not finite.
    is_likeliest_R = params.greedy_R | ~largest_R.isfinite()
    return ids_of(torch.where(is_likeliest_R, likeliest_R, drawn_R)), largest_R


def _choose_share(logits_FN: Tensor, rows: Sequence[Row], part: VocabularyPart) -> Tensor:
    """Keys of the tokens of this rank's share of the rows; the lowest key for all others."""
    whole_SV = part.share_out(logits_FN)[:, : part.vocab_size]
    first = part.rank * whole_SV.shape[0]
    mine = rows[first : first + whole_SV.shape[0]]
    keys_F = torch.full((len(rows),), _LOWEST_KEY, device=logits_FN.device)
    if mine:
        params = params_of(mine, vocab_size=part.vocab_size, device=logits_FN.device)
        token_ids, _ = choose_rows(whole_SV[: len(mine)].contiguous(), params)
        keys_F[first : first + len(mine)] = keys_of(torch.zeros_like(token_ids).float(), token_ids)
    return keys_F


def _likeliest(logits_RN: Tensor, first: int) -> Tensor:
    """The key of each row's largest logit; the lowest key if there are no columns."""
    if not logits_RN.shape[1]:
        return torch.full((logits_RN.shape[0],), _LOWEST_KEY, device=logits_RN.device)
    if can_run_kernels(logits_RN.device):
        from workers.verification.choice_kernels import likeliest_keys

        return likeliest_keys(logits_RN, first)
    values_R, columns_R = logits_RN.max(dim=1)
    return keys_of(values_R, first + columns_R)


def _draw(logits_RN: Tensor, likeliest_R: Tensor, params: RowParams, first: int) -> Tensor:
    """The key of each row's best score, for rows that are not greedy and have no filters."""
    if not logits_RN.shape[1]:
        return torch.full_like(likeliest_R, _LOWEST_KEY)
    if can_run_kernels(logits_RN.device):
        from workers.verification.choice_kernels import draw_keys

        return draw_keys(logits_RN, likeliest_R, params, first)
    log_weights_RN = logits_RN - values_of(likeliest_R)[:, None]
    log_weights_RN /= params.temperature_R[:, None]
    noise_RN = gumbel_noise_RV(
        params.keys_2R,
        params.positions_R,
        params.sample_indices_R,
        vocab_size=logits_RN.shape[1],
        first=first,
    )
    values_R, columns_R = log_weights_RN.add_(noise_RN).max(dim=1)
    return keys_of(values_R, first + columns_R)


def keys_of(values: Tensor, token_ids: Tensor) -> Tensor:
    """The int64 keys of float32 values and token ids.

    A larger value has a larger key; NaN has the largest. Among equal values the lowest id has the
    largest key.
    """
    bits = torch.where(values == 0.0, 0.0, values).view(torch.int32)  # -0 equals 0
    bits = bits.masked_fill(values.isnan(), _NAN_BITS)
    order = bits ^ ((bits >> 31) & _LARGEST_ID)
    return (order.to(torch.int64) << 32) | (token_ids.to(torch.int64) ^ _LARGEST_ID)


def values_of(keys: Tensor) -> Tensor:
    """The values of keys."""
    order = (keys >> 32).to(torch.int32)
    return (order ^ ((order >> 31) & _LARGEST_ID)).view(torch.float32)


def ids_of(keys: Tensor) -> Tensor:
    """The token ids of keys, int32."""
    return ((keys & _LARGEST_ID) ^ _LARGEST_ID).to(torch.int32)
