"""The target's own tokens for many rows at once, on the device that has their logits.

The arithmetic and its order are those of distribution.py and choice.py, on tensors. The host needs
no value from the device, so it never waits. The token ids equal those of choice.py, unless two
scores differ only by the rounding of exp or log. torch does the arithmetic, or our kernels where
they can run (choice_kernels.py). The sampling parameters of all rows are packed into one array,
which is copied to the device.

The noise has the same integers as noise.py, bit for bit. torch has no unsigned 64-bit arithmetic on
GPUs, so each word is the low half of an int64. A product wraps like an unsigned one, and a mask
removes the bits above a word before they matter.

Shapes: R rows, V vocabulary, N counters, E entries of sparse changes, S entries that the rows of a
text share, M tokens that are ruled out, A rows that follow a structure, B bytes of their masks; the
leading 2 is a pair of Philox words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.sampling import SamplingParams, SequenceSpec
from workers.process.kernels import can_run_kernels
from workers.verification.distribution import (
    depends_on_tokens,
    of_size,
    outputs_on_path,
    ruled_out,
)
from workers.verification.noise import KEY_STEPS, LANES, MULTIPLIERS, ROUNDS, Purpose, key_of_seed
from workers.verification.prefix import Prefix
from workers.verification.staging import to_device, to_host

_LOW_WORD = 0xFFFFFFFF
_LARGEST_V = 1 - 2.0**-24


def philox_words(even_2RN: Tensor, odd_2R1: Tensor, keys_2R1: Tensor) -> Tensor:
    """Philox 4x32-10 of int64 counters (words 0 and 2; words 1 and 3): int64 words [R, N, 4]."""
    multipliers_211, steps = _constants(even_2RN.device)
    round_keys = (keys_2R1 + steps) & _LOW_WORD
    odd_2RN = odd_2R1
    for number in range(ROUNDS):
        product_2RN = even_2RN * multipliers_211
        even_2RN = ((product_2RN >> 32).flip(0) ^ odd_2RN ^ round_keys[number]) & _LOW_WORD
        odd_2RN = product_2RN.flip(0)
    odd_2RN = odd_2RN & _LOW_WORD
    return torch.stack((even_2RN[0], odd_2RN[0], even_2RN[1], odd_2RN[1]), dim=-1)


def gumbel_noise_RV(
    keys_2R: Tensor,
    positions_R: Tensor,
    sample_indices_R: Tensor,
    *,
    vocab_size: int,
) -> Tensor:
    """Float32 Gumbel noise [R, V]: row r is `gumbel` of the words of that row's stream.

    All tensors are int64 and on one device, where the noise is computed. The integers are those of
    noise.py; the logarithms are the device's, and may differ from numpy's in the last bit.
    """
    num_rows = positions_R.shape[0]
    counters_N = torch.arange(-(-vocab_size // LANES), device=positions_R.device)
    purpose_N = torch.full_like(counters_N, int(Purpose.COUPLED))
    even_2RN = torch.stack((counters_N, purpose_N))[:, None]
    odd_2R1 = torch.stack((positions_R, sample_indices_R))[:, :, None]
    words_RN4 = philox_words(even_2RN, odd_2R1, keys_2R[:, :, None])
    noise_RV = words_RN4.reshape(num_rows, -1)[:, :vocab_size].to(torch.float32)
    noise_RV = noise_RV.add_(0.5).mul_(2.0**-32).clamp_max_(_LARGEST_V)
    return noise_RV.neg_().log1p_().neg_().log_().neg_()


@functools.cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Multipliers [2, 1, 1], and what each round adds to the key, [rounds, 2, 1, 1].

    Made once, on the device: the host would wait for a copy of host data.
    """
    steps_21, multipliers_21 = (
        torch.stack([torch.full((1,), word, dtype=torch.int64, device=device) for word in words])
        for words in (KEY_STEPS, MULTIPLIERS)
    )
    numbers_N = torch.arange(ROUNDS, device=device)
    steps_N2 = (numbers_N[:, None] * steps_21[:, 0]) & _LOW_WORD
    return multipliers_21[:, :, None], steps_N2[:, :, None, None]


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

    The rows of a text share its changes: row r has `count_R[r]` entries of `text_ids_S`, from
    `first_R[r]` on. `num_shared` is the sum of `count_R`. For tokens on a row's own path, the
    changes in `own` apply instead. `own_2E` and `masked_2M` are pairs (row, token id). No token
    occurs twice in a row's entries. `structured_A`: rows that follow a structure; `allowed_AB` has
    a bit for each token of the row, 8 in a byte (uint8), the lowest bit first.
    """

    text_ids_S: Tensor
    text: Changes
    first_R: Tensor
    count_R: Tensor
    num_shared: int
    own_2E: Tensor
    own: Changes
    masked_2M: Tensor
    structured_A: Tensor
    allowed_AB: Tensor


@dataclass(frozen=True, slots=True)
class RowParams:
    """The parameters of each row's distribution and noise; all tensors are on the logits' device.

    Top-k is off if `top_k_R` is V or more, top-p if `top_p_R` (float64) is 1, min-p if
    `log_min_p_R` is -inf. Greedy rows have a temperature of 1. `draws`: at least one row is not
    greedy. `filters`: at least one row has top-k, top-p or min-p. The host knows both and uses them
    to skip work.
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
    logits_RV = adjusted(logits_RV, rows)
    if can_run_kernels(logits_RV.device):
        from workers.verification.choice_kernels import choose_by_kernels

        return choose_by_kernels(logits_RV, rows)
    return choose_by_torch(logits_RV, rows)


def choose_by_torch(logits_RV: Tensor, rows: RowParams) -> tuple[Tensor, Tensor]:
    """choose_rows for adjusted logits, on any device. Allocates noise and scores [R, V]."""
    largest_R, likeliest_R = logits_RV.max(dim=1)
    if not rows.draws:
        return likeliest_R.to(torch.int32), largest_R
    scores_RV = _scores(logits_RV, largest_R, rows)
    chosen_R = torch.where(rows.greedy_R, likeliest_R, scores_RV.argmax(dim=1))
    return chosen_R.to(torch.int32), largest_R


def _scores(logits_RV: Tensor, largest_R: Tensor, rows: RowParams) -> Tensor:
    """Log probabilities plus noise, up to a constant of the row; -inf for tokens not kept."""
    log_weights_RV = (logits_RV - largest_R[:, None]) / rows.temperature_R[:, None]
    scores_RV = log_weights_RV + gumbel_noise_RV(
        rows.keys_2R, rows.positions_R, rows.sample_indices_R, vocab_size=logits_RV.shape[1]
    )
    if rows.filters:
        scores_RV = scores_RV.masked_fill_(~kept(log_weights_RV, rows), -torch.inf)
    return scores_RV


def adjusted(logits_RV: Tensor, params: RowParams) -> Tensor:
    """The logits after bias, penalties and masks; the same tensor if there are none."""
    changes = params.adjustments
    if changes is None:
        return logits_RV
    logits_RV = logits_RV.clone()
    own_row_E, own_id_E = changes.own_2E
    before_E = logits_RV[own_row_E, own_id_E]
    if changes.num_shared:
        count_R = changes.count_R
        rows = torch.arange(count_R.numel(), device=count_R.device)
        row_E = torch.repeat_interleave(rows, count_R, output_size=changes.num_shared)
        # For each row: the index of its first entry in `text_ids_S`, minus that in `row_E`.
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
    if changes.structured_A.numel():
        rows_A = changes.structured_A
        bits_8 = torch.arange(8, dtype=torch.uint8, device=rows_A.device)
        allowed_AV = ((changes.allowed_AB[:, :, None] >> bits_8) & 1).flatten(1)
        allowed_AV = allowed_AV[:, : logits_RV.shape[1]].to(torch.bool)
        logits_RV[rows_A] = logits_RV[rows_A].masked_fill_(~allowed_AV, -torch.inf)
    return logits_RV


def _changed(values_E: Tensor, changes: Changes) -> Tensor:
    """The values after the changes. Each step is capped at the largest float32, so that a huge
    bias cannot become infinite.
    """
    values_E = (values_E + changes.bias_E).clamp_max(_FLOAT32.max)
    penalty_E = changes.repetition_E
    values_E = torch.where(values_E < 0, values_E * penalty_E, values_E / penalty_E)
    values_E = values_E.clamp_max_(_FLOAT32.max) - changes.subtracted_E
    return values_E.clamp_max_(_FLOAT32.max)


def kept(log_weights_RV: Tensor, rows: RowParams) -> Tensor:
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


_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of logits, for the token after `prefix` and then `path`, the row's candidates."""

    spec: SequenceSpec
    prefix: Sequence[int]
    path: Sequence[int] = ()

    @property
    def position(self) -> int:
        return len(self.prefix) + len(self.path)

    @property
    def whole_prefix(self) -> Prefix:
        """All tokens before the row."""
        prefix = Prefix.of(self.prefix, prompt_length=self.spec.prompt_length)
        return prefix.followed_by(self.path)


def needs_room(rows: Sequence[Row], vocab_size: int) -> bool:
    """Whether choosing a row's token takes memory proportional to V, even with kernels."""
    return any(
        adjusts(spec) or filters(spec.sampling, vocab_size) for spec in _distinct(rows).values()
    )


def pack_rows(rows: Sequence[Row], *, vocab_size: int, device: torch.device) -> RowParams:
    """The parameters of all rows, in order, on the device.

    There is one copy to the device, and every tensor is a view of it. The host would need more time
    for separate copies and casts than the device needs for a choice.
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
    packed = np.zeros((8, len(rows)), dtype=np.int64)
    packed[:4] = np.array(whole_S4, dtype=np.int64).T[:, place_R]
    packed[4] = [row.position for row in rows]
    packed[5].view(np.float64)[:] = np.array([one.top_p for one in sampled])[place_R]
    packed[6].view(np.float32).reshape(2, -1)[:] = _reals(sampled)[:, place_R]
    packed[7].view(np.bool_)[: len(rows)] = greedy_S[place_R]
    packed_8R = to_device(packed, device)
    real_2R = packed_8R[6].view(torch.float32).view(2, -1)
    params = RowParams(
        greedy_R=packed_8R[7].view(torch.bool)[: len(rows)],
        temperature_R=real_2R[0],
        top_k_R=packed_8R[2],
        top_p_R=packed_8R[5].view(torch.float64),
        log_min_p_R=real_2R[1],
        keys_2R=packed_8R[:2],
        positions_R=packed_8R[4],
        sample_indices_R=packed_8R[3],
        draws=not greedy_S.all(),
        filters=any(filters(one, vocab_size) for one in sampled),
    )
    if not any(map(adjusts, specs.values())):
        return params
    return replace(params, adjustments=_pack_adjustments(rows, vocab_size, device))


def _distinct(rows: Sequence[Row]) -> dict[int, SequenceSpec]:
    """The distinct specs of all rows, by identity."""
    return {id(row.spec): row.spec for row in rows}


def _reals(sampled: Sequence[SamplingParams]) -> NDArray[np.float32]:
    """Temperatures, rounded up to the smallest normal float32 (1 if greedy), and logs of min-p."""
    temperatures_S = [max(one.temperature, _TINY) if one.temperature else 1.0 for one in sampled]
    log_min_p_S = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in sampled]
    with np.errstate(over="ignore"):
        return np.array([temperatures_S, log_min_p_S]).astype(np.float32)


def adjusts(spec: SequenceSpec) -> bool:
    """Whether bias, penalties or masks may change logits."""
    sampling = spec.sampling
    if spec.structure is not None or spec.bad_words:
        return True
    return bool(sampling.logit_bias) or sampling.has_penalties or sampling.min_tokens > 0


def filters(sampling: SamplingParams, vocab_size: int) -> bool:
    """Whether top-k, top-p or min-p may rule out tokens."""
    cuts = 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return cuts and not sampling.greedy


_Entries = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Different token ids [N], and the three numbers of Changes for each, [3, N]."""


def _pack_adjustments(
    rows: Sequence[Row], vocab_size: int, device: torch.device
) -> Adjustments | None:
    prefixes = [row.whole_prefix for row in rows]
    texts: list[_Entries] = []
    place_of: dict[tuple[int, int], int] = {}
    text_of_row: list[int] = []
    own: list[_Entries] = []
    own_rows: list[int] = []
    masked: list[tuple[int, int]] = []
    structured: list[int] = []
    allowed: list[NDArray[np.uint8]] = []
    for index, (row, prefix) in enumerate(zip(rows, prefixes, strict=True)):
        sampling = row.spec.sampling
        text = id(prefix.text), prefix.length
        if text not in place_of:
            place_of[text] = len(texts)
            texts.append(_of_text(prefix, sampling, vocab_size))
        text_of_row.append(place_of[text])
        if prefix.path and depends_on_tokens(sampling):
            own.append(_of_path(prefix, sampling, vocab_size))
            own_rows += [index] * own[-1][0].size
        out = sorted(set(ruled_out(row.spec, prefix)))
        masked += [(index, one) for one in out if one < vocab_size]
        allowed_V = None if row.spec.structure is None else prefix.allowed_V()
        if allowed_V is not None:
            structured.append(index)
            allowed.append(np.packbits(of_size(allowed_V, vocab_size), bitorder="little"))
    sizes = np.array([ids.size for ids, _ in texts])
    num_shared = int(sizes[text_of_row].sum())
    if not (num_shared or own_rows or masked or structured):
        return None
    text_ids_S, text_numbers_3S = _joined(texts)
    own_ids_E, own_numbers_3E = _joined(own)
    whole = [
        text_ids_S,
        (np.cumsum(sizes) - sizes)[text_of_row],
        sizes[text_of_row],
        np.concatenate((np.array(own_rows, dtype=np.int64), own_ids_E)),
        np.array(masked, dtype=np.int64).reshape(-1, 2).T.ravel(),
    ]
    # One copy for all of them, as 64-bit words.
    numbers_F = np.concatenate((text_numbers_3S.ravel(), own_numbers_3E.ravel()))
    real = np.pad(numbers_F, (0, numbers_F.size % 2)).view(np.int64)
    packed = to_device(np.concatenate((*whole, real)), device)
    *integers, words = packed.split([*(part.size for part in whole), real.size])
    text_ids, first_R, count_R, own_2E, masked_2M = integers
    real_F = words.view(torch.float32)
    text_3S = real_F[: text_numbers_3S.size].view(3, -1)
    own_3E = real_F[text_numbers_3S.size : numbers_F.size].view(3, -1)
    return Adjustments(
        text_ids,
        Changes(*text_3S),
        first_R,
        count_R,
        num_shared,
        own_2E.view(2, -1),
        Changes(*own_3E),
        masked_2M.view(2, -1),
        to_device(np.array(structured, dtype=np.int64), device),
        to_device(np.stack(allowed) if allowed else np.empty((0, 0), dtype=np.uint8), device),
    )


def _joined(entries: Sequence[_Entries]) -> _Entries:
    ids = [one for one, _ in entries] or [np.empty(0, dtype=np.int64)]
    numbers = [one for _, one in entries] or [np.empty((3, 0), dtype=np.float32)]
    return np.concatenate(ids), np.concatenate(numbers, axis=1)


def _of_text(prefix: Prefix, sampling: SamplingParams, vocab_size: int) -> _Entries:
    """The entries of all tokens that have a bias, or occur in the text before the path."""
    ids_N = outputs_N = np.empty(0, dtype=np.int64)
    places: list[int | None] = [None] * len(sampling.logit_bias)
    if depends_on_tokens(sampling):
        counts = prefix.counts
        ids_N, outputs_N = counts.ids_N, counts.outputs_N
        places = [counts.place_of(token_id) for token_id in sampling.logit_bias]
    pairs = zip(sampling.logit_bias, places, strict=True)
    unseen = [token_id for token_id, place in pairs if place is None]
    ids_S = np.concatenate((ids_N, np.array(unseen, dtype=np.int64)))
    numbers_3S = np.zeros((3, ids_S.size), dtype=np.float32)
    new_places = iter(range(ids_N.size, ids_S.size))
    biased = [next(new_places) if place is None else place for place in places]
    numbers_3S[0, biased] = _float32(list(sampling.logit_bias.values()))
    numbers_3S[1:, ids_N.size :] = [[1.0], [0.0]]
    numbers_3S[1:, : ids_N.size] = _penalties(outputs_N, sampling)
    return _checked(ids_S, vocab_size), numbers_3S


def _of_path(prefix: Prefix, sampling: SamplingParams, vocab_size: int) -> _Entries:
    """The entries of the tokens on the path."""
    token_ids = list(dict.fromkeys(prefix.path))
    numbers_3E = np.empty((3, len(token_ids)), dtype=np.float32)
    numbers_3E[0] = _float32([sampling.logit_bias.get(one, 0.0) for one in token_ids])
    numbers_3E[1:] = _penalties(outputs_on_path(prefix, token_ids), sampling)
    return _checked(np.array(token_ids, dtype=np.int64), vocab_size), numbers_3E


def _penalties(outputs_N: NDArray[np.int64], sampling: SamplingParams) -> NDArray[np.float32]:
    """Repetition penalty and subtraction for tokens that occur `outputs_N` times in the output."""
    subtracted_N = sampling.presence_penalty + sampling.frequency_penalty * outputs_N
    repetition_N = np.full(outputs_N.size, sampling.repetition_penalty)
    return np.stack((repetition_N, np.where(outputs_N > 0, subtracted_N, 0.0))).astype(np.float32)


def _float32(numbers: Sequence[float]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # overflow is capped where the number is added
        return np.array(numbers, dtype=np.float64).astype(np.float32)


def _checked(ids_N: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    assert not ids_N.size or 0 <= ids_N.min() <= ids_N.max() < vocab_size, "ids outside vocabulary"
    return ids_N


ROWS_AT_ONCE = 64
"""Maximum number of rows whose tokens are chosen together, if that needs memory proportional to V.
Filters, adjusted logits and noise in torch take up to some hundred bytes per row and vocabulary
entry. The profile run does not account for this memory.
"""


def choose_tokens(logits_RV: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """The coupled rule's token and the largest logit of each row, both still on the device."""
    spares = can_run_kernels(logits_RV.device) and not needs_room(rows, logits_RV.shape[1])
    size = len(rows) if spares else ROWS_AT_ONCE
    parts = [
        _choose(logits_RV[first : first + size], rows[first : first + size])
        for first in range(0, len(rows), size)
    ]
    if len(parts) == 1:
        return parts[0]
    token_ids, largest = zip(*parts, strict=True)
    return torch.cat(token_ids), torch.cat(largest)


@dataclass(frozen=True, slots=True)
class BestTokens:
    """The K best tokens of each row for the coupled rule, the best one first, as top_children.

    `scores_RK`: -inf where the sampling parameters leave fewer than K tokens. `logits_RK`: the
    tokens' logits before bias and penalties. `largest_R`: as of choose_rows. All are on the device.
    """

    token_ids_RK: Tensor
    scores_RK: Tensor
    logits_RK: Tensor
    largest_R: Tensor


def best_tokens(logits_RV: Tensor, rows: Sequence[Row], count: int) -> BestTokens:
    """The `count` best tokens of each row (or V, if that is less).

    Among equal scores, a device may take others than the host. Takes memory proportional to V.
    """
    count = min(count, logits_RV.shape[1])
    parts = []
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part_RV = logits_RV[first : first + ROWS_AT_ONCE]
        params = pack_rows(
            rows[first : first + ROWS_AT_ONCE], vocab_size=part_RV.shape[1], device=part_RV.device
        )
        adjusted_RV = adjusted(part_RV, params)
        largest_R = adjusted_RV.amax(dim=1)
        scores_RV = adjusted_RV
        if params.draws:
            drawn_RV = _scores(adjusted_RV, largest_R, params)
            scores_RV = torch.where(params.greedy_R[:, None], adjusted_RV, drawn_RV)
        scores_RK, ids_RK = scores_RV.topk(count, dim=1)
        parts.append((ids_RK, scores_RK, part_RV.gather(1, ids_RK), largest_R))
    return BestTokens(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _choose(logits_RV: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    params = pack_rows(rows, vocab_size=logits_RV.shape[1], device=logits_RV.device)
    return choose_rows(logits_RV, params)


def make_ready(vocab_size: int, device: torch.device) -> None:
    """Choose a token in each way, so that kernels are compiled before the first request."""
    logits_1V = torch.zeros(1, vocab_size, device=device)
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)):
        row = Row(SequenceSpec(sampling, seed=0, prompt_length=1), [0])
        to_host(*choose_tokens(logits_1V, [row]))
