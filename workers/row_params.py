"""What the rows of a step are sampled with, packed into one array and sent to the device."""

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
from workers.verification.distribution import depends_on_tokens
from workers.verification.philox import key_of_seed

_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of logits: those after `prefix` and `path`, all token ids before the one to choose."""

    spec: SequenceSpec
    prefix: Sequence[int]
    path: Sequence[int] = ()

    @property
    def position(self) -> int:
        return len(self.prefix) + len(self.path)


def needs_room(rows: Sequence[Row], vocab_size: int) -> bool:
    """Whether some row's choice takes memory in proportion to the vocabulary, even by kernels."""
    return any(
        _adjusts(spec.sampling) or _filters(spec.sampling, vocab_size)
        for spec in _distinct(rows).values()
    )


def pack_rows(rows: Sequence[Row], *, vocab_size: int, device: torch.device) -> RowParams:
    """The parameters of all rows, in their order, on the device. Raises nothing.

    One copy to the device, of which every tensor is a view: copies and casts would each cost the
    host more than the device takes for a choice. The rows of a sequence share its spec.
    """
    specs = _distinct(rows)
    sampled = [spec.sampling for spec in specs.values()]
    places = {identity: place for place, identity in enumerate(specs)}
    place_R = np.array([places[id(row.spec)] for row in rows])
    whole_S4 = [
        (*key_of_seed(spec.seed), spec.sampling.top_k or vocab_size, spec.sample_index)
        for spec in specs.values()
    ]
    greedy_S = np.array([one.greedy for one in sampled])
    packed_8R = np.zeros((8, len(rows)), dtype=np.int64)
    packed_8R[:4] = np.array(whole_S4, dtype=np.int64).T[:, place_R]
    packed_8R[4] = [row.position for row in rows]
    packed_8R[5].view(np.float64)[:] = np.array([one.top_p for one in sampled])[place_R]
    packed_8R[6].view(np.float32).reshape(2, -1)[:] = _reals(sampled)[:, place_R]
    packed_8R[7].view(np.bool_)[: len(rows)] = greedy_S[place_R]
    on_device_8R = to_device(packed_8R, device)
    real_2R = on_device_8R[6].view(torch.float32).view(2, -1)
    return RowParams(
        greedy_R=on_device_8R[7].view(torch.bool)[: len(rows)],
        temperature_R=real_2R[0],
        top_k_R=on_device_8R[2],
        top_p_R=on_device_8R[5].view(torch.float64),
        log_min_p_R=real_2R[1],
        keys_2R=on_device_8R[:2],
        positions_R=on_device_8R[4],
        sample_indices_R=on_device_8R[3],
        draws=not greedy_S.all(),
        filters=any(_filters(one, vocab_size) for one in sampled),
        adjustments=(
            _pack_adjustments(rows, vocab_size, device) if any(map(_adjusts, sampled)) else None
        ),
    )


def _distinct(rows: Sequence[Row]) -> dict[int, SequenceSpec]:
    """The specs of all rows, each once, by identity."""
    return {id(row.spec): row.spec for row in rows}


def _reals(sampled: Sequence[SamplingParams]) -> NDArray[np.float32]:
    """Temperatures, none so small that it would be 0 (1: greedy), and logarithms of min-p."""
    temperatures_S = [max(one.temperature, _TINY) if one.temperature else 1.0 for one in sampled]
    log_min_p_S = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in sampled]
    with np.errstate(over="ignore"):
        return np.array([temperatures_S, log_min_p_S]).astype(np.float32)


def _adjusts(sampling: SamplingParams) -> bool:
    """Whether bias, penalties or min_tokens may change logits."""
    return bool(sampling.logit_bias) or sampling.has_penalties or sampling.min_tokens > 0


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
    entries_2E = np.stack([np.array(of_row, dtype=np.int64), np.concatenate(ids)])
    masked_2M = np.array(masked, dtype=np.int64).reshape(-1, 2).T
    numbers_F = np.concatenate(numbers, axis=1).ravel()
    # In one copy, as words of 64 bits.
    whole = np.concatenate((entries_2E.ravel(), masked_2M.ravel()))
    real = np.pad(numbers_F, (0, numbers_F.size % 2)).view(np.int64)
    packed = to_device(np.concatenate((whole, real)), device)
    first = entries_2E.size
    real_3E = packed[whole.size :].view(torch.float32)[: numbers_F.size].view(3, -1)
    return Adjustments(
        packed[:first].view(2, -1),
        real_3E[0],
        real_3E[1],
        real_3E[2],
        packed[first : whole.size].view(2, -1),
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
