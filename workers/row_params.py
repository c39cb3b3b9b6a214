"""What the rows of a step are sampled with, packed into a few arrays and sent to the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.cuda.staging import to_device
from workers.verification.device_choice import Adjustments, RowParams
from workers.verification.device_noise import key_words
from workers.verification.distribution import depends_on_tokens

_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of logits: those after `prefix` and `path`, all token ids before the one to choose."""

    spec: SequenceSpec
    prefix: Sequence[int]
    path: Sequence[int] = ()

    @property
    def position(self) -> int:
        return len(self.prefix) + len(self.path)


def pack_rows(rows: Sequence[Row], *, vocab_size: int, device: torch.device) -> RowParams:
    """The parameters of all rows, in their order, on the device. Raises nothing."""
    sampled = [row.spec.sampling for row in rows]
    keys = np.array([key_words(row.spec.seed) for row in rows], dtype=np.int64)
    whole = np.stack(
        [
            np.array([one.greedy for one in sampled], dtype=np.int64),
            np.array([one.top_k or vocab_size for one in sampled], dtype=np.int64),
            keys[:, 0],
            keys[:, 1],
            np.array([row.position for row in rows], dtype=np.int64),
            np.array([row.spec.sample_index for row in rows], dtype=np.int64),
        ]
    )
    real = np.array([_reals(one) for one in sampled], dtype=np.float64).T
    whole_6R = to_device(whole, device)
    real_3R = to_device(real, device)
    return RowParams(
        greedy_R=whole_6R[0].bool(),
        temperature_R=real_3R[0].to(torch.float32),
        top_k_R=whole_6R[1],
        top_p_R=real_3R[1],
        log_min_p_R=real_3R[2].to(torch.float32),
        keys_2R=whole_6R[2:4],
        positions_R=whole_6R[4],
        sample_indices_R=whole_6R[5],
        draws=not all(one.greedy for one in sampled),
        filters=any(_filters(one, vocab_size) for one in sampled),
        adjustments=_pack_adjustments(rows, vocab_size, device),
    )


def _reals(sampling: SamplingParams) -> tuple[float, float, float]:
    temperature = 1.0 if sampling.greedy else sampling.temperature
    return (
        float(np.maximum(np.float32(temperature), _FLOAT32.tiny)),
        sampling.top_p,
        float(np.float32(math.log(sampling.min_p))) if sampling.min_p > 0 else -math.inf,
    )


def _filters(sampling: SamplingParams, vocab_size: int) -> bool:
    cuts = 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return cuts and not sampling.greedy


def _pack_adjustments(
    rows: Sequence[Row], vocab_size: int, device: torch.device
) -> Adjustments | None:
    ids: list[NDArray[np.int64]] = []
    numbers: list[NDArray[np.float32]] = []
    of_row: list[int] = []
    masked: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        ids_E, numbers_3E = _changes(row, vocab_size)
        ids.append(ids_E)
        numbers.append(numbers_3E)
        of_row += [index] * ids_E.size
        if row.position - row.spec.prompt_length < row.spec.sampling.min_tokens:
            end_ids = set(row.spec.end_token_ids)
            masked += [(index, one) for one in sorted(end_ids) if one < vocab_size]
    if not of_row and not masked:
        return None
    bias_E, repetition_E, subtracted_E = to_device(np.concatenate(numbers, axis=1), device)
    entries_2E = np.stack([np.array(of_row, dtype=np.int64), np.concatenate(ids)])
    masked_2M = np.array(masked, dtype=np.int64).reshape(-1, 2).T
    return Adjustments(
        to_device(entries_2E, device),
        bias_E,
        repetition_E,
        subtracted_E,
        to_device(masked_2M, device),
    )


def _changes(row: Row, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Token ids that bias or penalties change, and for each: bias, repetition, subtraction."""
    sampling = row.spec.sampling
    if not sampling.logit_bias and not depends_on_tokens(sampling):
        return np.empty(0, dtype=np.int64), np.empty((3, 0), dtype=np.float32)
    biased = np.fromiter(sampling.logit_bias, dtype=np.int64)
    seen = np.empty(0, dtype=np.int64)
    if depends_on_tokens(sampling):
        seen = np.concatenate((np.array(row.prefix, np.int64), np.array(row.path, np.int64)))
    assert not seen.size or 0 <= seen.min() <= seen.max() < vocab_size, "ids outside vocabulary"
    ids_E = np.unique(np.concatenate((biased, seen)))
    numbers_3E = np.zeros((3, ids_E.size), dtype=np.float32)
    with np.errstate(over="ignore"):  # what leaves float32 is capped where it is added
        bias = np.fromiter(sampling.logit_bias.values(), dtype=np.float64).astype(np.float32)
    numbers_3E[0, np.searchsorted(ids_E, biased)] = bias
    numbers_3E[1] = 1.0
    numbers_3E[1, np.searchsorted(ids_E, seen)] = sampling.repetition_penalty
    output, counts = np.unique(seen[row.spec.prompt_length :], return_counts=True)
    numbers_3E[2, np.searchsorted(ids_E, output)] = (
        sampling.presence_penalty + sampling.frequency_penalty * counts
    )
    return ids_E, numbers_3E
