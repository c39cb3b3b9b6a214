"""The target's own tokens, chosen by ranks that have the logits of one part of the vocabulary each.

All ranks get the tokens that one rank chooses from whole rows (device_choice.py), bit for bit:

- Bias, penalties, min_tokens and bad words change single logits, so each rank changes those of its
  part. The mask of a structure is cut to it: each rank follows the structure itself.
- The largest logit of a row is the largest of all parts. It is exchanged as a key, an integer that
  orders by value first, and then by token id, the lowest first.
- A score depends on its token's logit and noise, and on the row's largest logit. So each rank finds
  the best score of its part, and the best of all parts is exchanged as a key, too.
- Min-p compares a token's weight with the largest one.
- Top-k and top-p need the weights of a whole row in order. The ranks share the rows that have such
  filters: each gets some of them whole, chooses their tokens alone, and gives the token as a key to
  the second exchange.
- A rule that tosses coins names some tokens of a row. A third exchange has these tokens' weights,
  and for all others their sum and the best score (row_sums.py). What the filters leave is told by
  the key of the least likely token that they keep.

Shapes: R rows, V vocabulary, N columns of a rank, S rows of a rank's share, W ranks, Q rows with
named tokens, M named tokens, K best tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.sampling import SamplingParams, SequenceSpec
from workers.process.kernels import can_run_kernels
from workers.verification.device_choice import (
    ROWS_AT_ONCE,
    Row,
    RowParams,
    adjusted,
    choose_rows,
    gumbel_noise_RV,
    kept,
    needs_room,
    pack_rows,
    params_of,
    sorts,
)
from workers.verification.noise import Purpose
from workers.verification.row_sums import RowSums
from workers.verification.staging import to_device, to_host

_LOWEST_KEY = -(2**63)
_LARGEST_KEY = 2**63 - 1
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


Named = Mapping[int, NDArray[np.int64]]
"""Ascending token ids [M] by row: those of which a rule needs more than their sum."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What ranks find together. Tensors are on the device, and equal on all ranks.

    `token_ids_R` (int32) and `largest_R` are those of device_choice.choose_tokens. `sums`: for each
    block of rows, its named rows and what all ranks gave for them, [W, Q, M + 2]; see `sums_of`.
    `faults`: why this rank could not follow a row's structure, by row. No rank finds a token there.
    """

    token_ids_R: Tensor
    largest_R: Tensor
    sums: list[tuple[Named, Tensor]]
    faults: dict[int, Exception]


def choose_in_parts(
    logits_RN: Tensor, rows: Sequence[Row], part: VocabularyPart, named: Named | None = None
) -> Choices:
    """As device_choice.choose_tokens, on each rank. All ranks must call it with the same rows."""
    named = named or {}
    spares = can_run_kernels(logits_RN.device) and not needs_room(rows, part.vocab_size)
    size = len(rows) if spares and not named else ROWS_AT_ONCE
    blocks = []
    for first in range(0, len(rows), size):
        some = {row - first: ids for row, ids in named.items() if first <= row < first + size}
        block = logits_RN[first : first + size], rows[first : first + size]
        blocks.append((first, _choose(*block, part, some)))
    return Choices(
        torch.cat([found.token_ids_R for _, found in blocks]),
        torch.cat([found.largest_R for _, found in blocks]),
        [
            ({first + row: ids for row, ids in some.items()}, numbers)
            for first, found in blocks
            for some, numbers in found.sums
        ],
        {first + row: error for first, found in blocks for row, error in found.faults.items()},
    )


def best_in_parts(logits_RN: Tensor, count: int, part: VocabularyPart) -> Tensor:
    """The keys of each row's `count` largest logits, [R, K], the largest first, on each rank.

    Of equal logits, the lowest ids come first. K is V if that is less than `count`.
    """
    best = [
        best_of_part(logits_RN[first : first + ROWS_AT_ONCE], count, part)
        for first in range(0, logits_RN.shape[0], ROWS_AT_ONCE)
    ]
    best_RK = torch.cat(best)
    return best_of_all(part.gather(best_RK.flatten()).view(-1, *best_RK.shape))


def best_of_part(logits_RN: Tensor, count: int, part: VocabularyPart) -> Tensor:
    """As best_in_parts, of this rank's part; the lowest keys follow if it has too few tokens."""
    held, count = part.token_ids, min(count, part.vocab_size)
    ids_N = torch.arange(held.start, held.stop, device=logits_RN.device)
    keys_RN = keys_of(logits_RN[:, : len(held)], ids_N)
    best_RK = keys_RN.topk(min(count, len(held)), dim=1).values
    return torch.nn.functional.pad(best_RK, (0, count - best_RK.shape[1]), value=_LOWEST_KEY)


def best_of_all(keys_WRK: Tensor) -> Tensor:
    """The best keys of each row [R, K], from those of all ranks."""
    return keys_WRK.transpose(0, 1).flatten(1).topk(keys_WRK.shape[2], dim=1).values


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
        choices = choose_in_parts(logits_1N, [row], part)
        to_host(choices.token_ids_R, choices.largest_R)


def _choose(logits_RN: Tensor, rows: Sequence[Row], part: VocabularyPart, named: Named) -> Choices:
    device, held = logits_RN.device, part.token_ids
    columns = range(held.start, held.start + logits_RN.shape[1])
    faults: dict[int, Exception] = {}
    params = pack_rows(rows, vocab_size=part.vocab_size, device=device, held=columns, faults=faults)
    logits_RN = adjusted(logits_RN, params)
    if faults:  # The other ranks must not choose from their parts of these rows alone.
        logits_RN = logits_RN.index_fill(0, to_device(np.array(list(faults)), device), torch.nan)
    held_RN = logits_RN[:, : len(held)]
    likeliest_R = part.gather(_likeliest(held_RN, held.start)).amax(dim=0)
    largest_R = values_of(likeliest_R)
    chosen_R, least_R = likeliest_R, None
    if params.draws:
        if any(row.spec.sampling.min_p for row in rows):
            held_RN = _above_min_p(held_RN, largest_R, params)
        drawn_1R = _draw(held_RN, likeliest_R, params, held.start)[None]
        shared = [i for i, row in enumerate(rows) if sorts(row.spec.sampling, part.vocab_size)]
        if shared:
            places = to_device(np.array(shared), device)
            some = [rows[i] for i in shared]
            shares = _choose_share(logits_RN[places], some, part, with_least=bool(named))
            if named:
                drawn_1R = torch.cat((drawn_1R, torch.full_like(drawn_1R, _LOWEST_KEY)))
            drawn_1R = drawn_1R.index_copy(1, places, shares)
        drawn_R, *least = part.gather(drawn_1R.flatten()).amax(dim=0).view(drawn_1R.shape)
        least_R = least[0] if least else None
        # If a row has no token, its largest logit is the reason, and is not finite.
        is_likeliest_R = params.greedy_R | ~largest_R.isfinite()
        chosen_R = torch.where(is_likeliest_R, likeliest_R, drawn_R)
    sums = []
    if named:
        sums.append((named, _sums(held_RN, likeliest_R, least_R, params, named, part)))
    return Choices(ids_of(chosen_R), largest_R, sums, faults)


def _choose_share(
    logits_FN: Tensor, rows: Sequence[Row], part: VocabularyPart, *, with_least: bool
) -> Tensor:
    """Keys of the tokens of this rank's share of the rows; the lowest key for all others.

    [1, F]; or [2, F], and then the keys of the least likely tokens that the filters keep. Those
    have log weights for values.
    """
    whole_SV = part.share_out(logits_FN)[:, : part.vocab_size]
    first = part.rank * whole_SV.shape[0]
    mine = rows[first : first + whole_SV.shape[0]]
    keys_F = torch.full((1 + with_least, len(rows)), _LOWEST_KEY, device=logits_FN.device)
    if mine:
        span = slice(first, first + len(mine))
        whole_SV = whole_SV[: len(mine)].contiguous()
        params = params_of(mine, vocab_size=part.vocab_size, device=logits_FN.device)
        token_ids, largest_S = choose_rows(whole_SV, params)
        keys_F[0, span] = keys_of(torch.zeros_like(token_ids).float(), token_ids)
        if with_least:
            log_weights_SV = (whole_SV - largest_S[:, None]) / params.temperature_R[:, None]
            ids_V = torch.arange(part.vocab_size, device=whole_SV.device)
            keys_SV = keys_of(log_weights_SV, ids_V)
            keys_SV = keys_SV.masked_fill(~kept(log_weights_SV, params), _LARGEST_KEY)
            keys_F[1, span] = keys_SV.amin(dim=1)
    return keys_F


def _sums(
    logits_RN: Tensor,
    likeliest_R: Tensor,
    least_R: Tensor | None,
    params: RowParams,
    named: Named,
    part: VocabularyPart,
) -> Tensor:
    """For each named row, what each rank has of it: int64 [W, Q, M + 2].

    The float64 log weights of the named tokens (-inf: not this rank's, or not kept), the sum of the
    weights of all others, both as bits, and the key of the others' best score.
    """
    device, held = logits_RN.device, part.token_ids
    table_QM = np.full((len(named), 1 + max(ids.size for ids in named.values())), -1)
    for entry_M, (row, ids_M) in zip(table_QM, named.items(), strict=True):
        entry_M[: 1 + ids_M.size] = [row, *ids_M]
    rows_Q, ids_QM = to_device(table_QM, device).split((1, table_QM.shape[1] - 1), dim=1)
    rows_Q = rows_Q[:, 0]
    log_weights_QM = torch.full_like(ids_QM, -torch.inf, dtype=torch.float64)
    sums_Q = torch.zeros_like(log_weights_QM[:, 0])
    best_Q = torch.full_like(rows_Q, _LOWEST_KEY)
    if held:
        likeliest_Q, greedy_Q = likeliest_R[rows_Q], params.greedy_R[rows_Q]
        log_weights_QN = logits_RN[rows_Q] - values_of(likeliest_Q)[:, None]
        log_weights_QN /= params.temperature_R[rows_Q][:, None]
        ids_N = torch.arange(held.start, held.stop, device=device)
        # A greedy row keeps one token.
        zeros_Q = torch.zeros_like(log_weights_QN[:, 0])
        lowest_Q = best_Q if least_R is None else least_R[rows_Q]
        least_Q = torch.where(greedy_Q, keys_of(zeros_Q, ids_of(likeliest_Q)), lowest_Q)
        ruled_out_QN = keys_of(log_weights_QN, ids_N) < least_Q[:, None]
        log_weights_QN.masked_fill_(ruled_out_QN, -torch.inf)
        # One more column takes the ids of other ranks.
        columns_QM = ids_QM - held.start
        columns_QM = torch.where(
            (columns_QM < 0) | (columns_QM >= len(held)), len(held), columns_QM
        )
        others_QN = torch.nn.functional.pad(log_weights_QN, (0, 1), value=-torch.inf)
        log_weights_QM = others_QN.gather(1, columns_QM).double()
        others_QN = others_QN.scatter(1, columns_QM, -torch.inf)[:, :-1]
        sums_Q = others_QN.double().exp().sum(dim=1)
        noise_QN = gumbel_noise_RV(
            params.keys_2R[:, rows_Q],
            params.positions_R[rows_Q],
            params.sample_indices_R[rows_Q],
            vocab_size=len(held),
            first=held.start,
            purpose=Purpose.RESIDUAL,
        )
        values_Q, columns_Q = others_QN.add(noise_QN).max(dim=1)
        best_Q = keys_of(values_Q, held.start + columns_Q)
    weights_QM = torch.cat((log_weights_QM, sums_Q[:, None]), dim=1)
    mine_QM = torch.cat((weights_QM.view(torch.int64), best_Q[:, None]), dim=1)
    return part.gather(mine_QM.flatten()).view(-1, *mine_QM.shape)


def sums_of(named: Named, numbers_WQM: Tensor) -> dict[int, RowSums]:
    """The sums of each named row, from an entry of Choices.sums whose tensor is on the host."""
    keys_Q = numbers_WQM[:, :, -1].amax(dim=0)
    best, best_ids = values_of(keys_Q).tolist(), ids_of(keys_Q).tolist()
    numbers_WQM = numbers_WQM[:, :, :-1].contiguous().view(torch.float64)
    weights_QM = numbers_WQM[:, :, :-1].amax(dim=0).numpy()
    sums_Q = numbers_WQM[0, :, -1].clone()
    for others_Q in numbers_WQM[1:, :, -1]:
        sums_Q += others_Q
    return {
        row: RowSums(ids_M, weights_QM[i, : ids_M.size], float(sums_Q[i]), best[i], best_ids[i])
        for i, (row, ids_M) in enumerate(named.items())
    }


def _likeliest(logits_RN: Tensor, first: int) -> Tensor:
    """The key of each row's largest logit; the lowest key if there are no columns."""
    if not logits_RN.shape[1]:
        return torch.full((logits_RN.shape[0],), _LOWEST_KEY, device=logits_RN.device)
    if can_run_kernels(logits_RN.device):
        from workers.verification.choice_kernels import likeliest_keys

        return likeliest_keys(logits_RN, first)
    values_R, columns_R = logits_RN.max(dim=1)
    return keys_of(values_R, first + columns_R)


def _above_min_p(logits_RN: Tensor, largest_R: Tensor, params: RowParams) -> Tensor:
    """The logits, of which min-p rules out some."""
    log_weights_RN = (logits_RN - largest_R[:, None]) / params.temperature_R[:, None]
    return logits_RN.masked_fill(log_weights_RN < params.log_min_p_R[:, None], -torch.inf)


def _draw(logits_RN: Tensor, likeliest_R: Tensor, params: RowParams, first: int) -> Tensor:
    """The key of each row's best score, for rows that are not greedy and need no order."""
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
