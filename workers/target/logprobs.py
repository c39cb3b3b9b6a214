"""The log probabilities of tokens, from the rows of raw logits that give them.

On a CPU numpy adds up each row by itself, with one thread, so the same row gives the same bits in
any batch and with any number of threads; torch's sums depend on both. On a GPU torch does, in
blocks of one shape; whether the last bits depend on the batch there has not been measured.

Ranks that have parts of the vocabulary on GPUs each give their part's sum, the number of likelier
tokens and the best tokens. Rank 0 adds the sums in the order of the ranks.

Shapes: T rows of a step, R rows of a block, N columns of a rank, W ranks, K best tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.limits import MAX_LOGPROBS
from paceline.v1 import types_pb2
from workers.verification.split_choice import (
    VocabularyPart,
    best_of_all,
    best_of_part,
    ids_of,
    keys_of,
    values_of,
)
from workers.verification.staging import to_device, to_host

_BLOCK = 32
"""Rows of logits that are copied at a time. With 262,144 tokens these have 32 MiB."""


class WantedLogprobs(NamedTuple):
    """The log probability of a token after a row of logits, and of the `top` likeliest tokens."""

    row: int
    token_id: int
    top: int


def logprobs_of(
    logits_TV: Tensor, wanted: Sequence[WantedLogprobs]
) -> Iterator[types_pb2.TokenLogprobs]:
    """The log probabilities for each of `wanted`, by the softmax of its row as it is."""
    for first in range(0, len(wanted), _BLOCK):
        yield from _of_block(logits_TV, wanted[first : first + _BLOCK])


def _of_block(
    logits_TV: Tensor, wanted: Sequence[WantedLogprobs]
) -> Iterator[types_pb2.TokenLogprobs]:
    count = len(wanted)
    device = logits_TV.device
    # The same number of rows in each block, so that a GPU divides each row in the same way.
    padding = (0, 0 if device.type == "cpu" else _BLOCK - count)
    rows = np.pad(np.array([one.row for one in wanted]), padding)
    ids = np.pad(np.array([one.token_id for one in wanted]), padding)
    logits_RV = logits_TV.index_select(0, to_device(rows, device)).float()
    # Always as many: equal logits come in an order that depends on how many are asked for.
    top = min(MAX_LOGPROBS, logits_RV.shape[1])
    values_RK, ids_RK = logits_RV.topk(top)
    chosen_R1 = logits_RV.gather(1, to_device(ids, device)[:, None])
    ranks_R = 1 + (logits_RV > chosen_R1).sum(dim=1)
    if device.type == "cpu":
        logs_R = torch.tensor([_log_sum_exp(row_V) for row_V in logits_RV], dtype=torch.float64)
    else:
        logs_R = logits_RV.double().logsumexp(dim=1)
    columns = chosen_R1[:, 0].double() - logs_R, ranks_R, values_RK - logs_R[:, None], ids_RK
    own_R, ranks_R, values_RK, ids_RK = to_host(*columns)
    own, ranks = own_R.tolist(), ranks_R.tolist()
    for i, one in enumerate(wanted):
        yield types_pb2.TokenLogprobs(
            logprob=own[i],
            rank=ranks[i],
            top_ids=ids_RK[i, : one.top].tolist(),
            top_logprobs=values_RK[i, : one.top].tolist(),
        )


def _log_sum_exp(logits_V: Tensor) -> float:
    """NaN for a row with a NaN or an infinity. Its verdict is then an error, now or later."""
    row_V = logits_V.numpy()
    largest = row_V.max()
    with np.errstate(invalid="ignore"):
        return float(largest) + math.log(np.exp(row_V - largest).sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class PartialLogprobs:
    """What ranks find together for S entries, on the device: see logprobs_in_parts.

    `keys_2S`: of the entry's token, and of its row's likeliest. `numbers_WSN`: what each rank has:
    its K best keys, the number of tokens that are likelier than the entry's, and the bits of the
    float64 sum of its weights.
    """

    keys_2S: Tensor
    numbers_WSN: Tensor


def logprobs_in_parts(
    logits_TN: Tensor, wanted: Sequence[WantedLogprobs], most: int, part: VocabularyPart
) -> PartialLogprobs:
    """As logprobs_of, on each rank. Only rank 0 needs to know what is `wanted`.

    All ranks must call it with the same number of rows, and the same `most`: at least the number of
    entries at rank 0.
    """
    size = -(-most // _BLOCK) * _BLOCK
    pairs_2S = np.zeros((2, size), dtype=np.int64)
    for i, one in enumerate(wanted):
        pairs_2S[:, i] = one.row, one.token_id
    told_2S = part.gather(to_device(pairs_2S, logits_TN.device).flatten())[0].view(2, -1)
    blocks = [_of_part(logits_TN, told_2R, part) for told_2R in told_2S.split(_BLOCK, dim=1)]
    keys, numbers = zip(*blocks, strict=True)
    return PartialLogprobs(torch.cat(keys, dim=1), torch.cat(numbers, dim=1))


def _of_part(logits_TN: Tensor, told_2R: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    held, (rows_R, ids_R) = part.token_ids, told_2R
    logits_RN = logits_TN.index_select(0, rows_R)[:, : len(held)].float()
    columns_R = ids_R - held.start
    is_mine_R = (columns_R >= 0) & (columns_R < len(held))
    padded_RN = torch.nn.functional.pad(logits_RN, (0, 1), value=-torch.inf)
    chosen_R1 = padded_RN.gather(1, torch.where(is_mine_R, columns_R, len(held))[:, None])
    best_RK = best_of_part(logits_RN, MAX_LOGPROBS, part)
    mine_2R = torch.stack((keys_of(chosen_R1[:, 0], ids_R), best_RK[:, 0]))
    keys_2R = part.gather(mine_2R.flatten()).amax(dim=0).view(2, -1)
    chosen_R, largest_R = values_of(keys_2R)
    likelier_R = (logits_RN > chosen_R[:, None]).sum(dim=1)
    sums_R = (logits_RN.double() - largest_R.double()[:, None]).exp().sum(dim=1)
    mine_RN = torch.cat((best_RK, likelier_R[:, None], sums_R.view(torch.int64)[:, None]), dim=1)
    return keys_2R, part.gather(mine_RN.flatten()).view(-1, *mine_RN.shape)


def joined_logprobs(
    found: PartialLogprobs, wanted: Sequence[WantedLogprobs]
) -> list[types_pb2.TokenLogprobs]:
    """The log probabilities for each of `wanted`. Waits for the device."""
    keys_2S, numbers_WSN = to_host(found.keys_2S, found.numbers_WSN)
    sums_WS = numbers_WSN[:, :, -1].contiguous().view(torch.float64).numpy()
    sum_S = sums_WS[0].copy()
    for others_S in sums_WS[1:]:
        sum_S += others_S
    chosen_S, largest_S = values_of(keys_2S).double().numpy()
    logs_S = largest_S + np.log(sum_S)
    ranks = (1 + numbers_WSN[:, :, -2].sum(dim=0)).tolist()
    best_SK = best_of_all(numbers_WSN[:, :, :-2])
    ids = ids_of(best_SK).tolist()
    values_SK = values_of(best_SK).double().numpy() - logs_S[:, None]
    return [
        types_pb2.TokenLogprobs(
            logprob=float(chosen_S[i] - logs_S[i]),
            rank=ranks[i],
            top_ids=ids[i][: one.top],
            top_logprobs=values_SK[i, : one.top].tolist(),
        )
        for i, one in enumerate(wanted)
    ]
