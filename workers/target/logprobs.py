"""The log probabilities of tokens, from the rows of raw logits that give them.

On a CPU numpy adds up each row by itself, with one thread, so the same row gives the same bits in
any batch and with any number of threads; torch's sums depend on both. On a GPU torch does, in
blocks of one shape; whether the last bits depend on the batch there has not been measured.

Shapes: T rows of a step, R rows of a block, K best tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.limits import MAX_LOGPROBS
from paceline.v1 import types_pb2
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
