"""From logits to the distribution at one position.

The order is: logit bias, penalties, min_tokens, bad words, structure, then temperature, top-k,
top-p, min-p.
Each function here depends on one row only: the same row gives the same bits in any window or batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import InternalError
from paceline.sampling import SamplingParams, SequenceSpec
from workers.verification.candidates import CandidateTree
from workers.verification.prefix import Prefix

Logits = NDArray[np.float32] | torch.Tensor
"""Rows of logits on the host. Each operation on a tensor takes some 50 us right after a step, since
the weights have pushed torch's code out of the caches; one on an array takes a third of that."""

_FLOAT32 = np.finfo(np.float32)

# Top-k and top-p first look at tokens within this distance in nats of the likeliest, and widen it
# only if these cannot hold the answer. Any list that ends in infinity gives the same result.
_REACHES = (3.0, 6.0, 10.0, 15.0, math.inf)

# A sum that exceeds top-p's target by this factor exceeds it in any order of summation: rounding in
# float64 is below V * 2^-53 = 1e-11 for any V below 90,000, and 1e-10 below 900,000.
_CLEAR_MARGIN = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Distribution:
    """The N tokens that can be chosen, and the logs of their probabilities up to a constant.

    `token_ids` ascends; None means the whole vocabulary. The largest of `log_weights` is 0.
    """

    token_ids: NDArray[np.int64] | None
    log_weights: NDArray[np.float32]

    def where(self, kept_N: NDArray[np.bool_]) -> Distribution:
        """Only the tokens that the mask keeps."""
        return self.at(np.flatnonzero(kept_N))

    def at(self, indices: NDArray[np.int64]) -> Distribution:
        """Only the tokens at these ascending indices."""
        ids = indices if self.token_ids is None else self.token_ids[indices]
        return Distribution(ids, self.log_weights[indices])


def depends_on_tokens(sampling: SamplingParams) -> bool:
    """Whether penalties read the prefix's token ids. (A structure has its own state of them.)"""
    return sampling.has_penalties


def ruled_out(spec: SequenceSpec, prefix: Sequence[int]) -> list[int]:
    """Tokens that cannot follow `prefix`: ends before min_tokens, and last tokens of bad words."""
    num_output = len(prefix) - spec.prompt_length
    found = list(spec.end_token_ids) if num_output < spec.sampling.min_tokens else []
    if spec.bad_words:
        longest = max(map(len, spec.bad_words)) - 1
        before = tuple(prefix[len(prefix) - max(0, min(longest, num_output)) : len(prefix)])
        for word in spec.bad_words:
            if word[:-1] == before[max(0, len(before) - len(word) + 1) :]:
                found.append(word[-1])
    return found


def adjusted_logits(
    logits_V: NDArray[np.float32], spec: SequenceSpec, prefix: Prefix
) -> NDArray[np.float32]:
    """Logits after bias, penalties and masks; the same array if none applies.

    `prefix` has all tokens before the row. Its counts are read only if depends_on_tokens is true.
    Raises InternalError if the structure cannot be followed.
    """
    sampling = spec.sampling
    masked = ruled_out(spec, prefix)
    allowed_V = None if spec.structure is None else prefix.allowed_V()
    if not (sampling.logit_bias or sampling.has_penalties or masked):
        return logits_V if allowed_V is None else _only(logits_V, allowed_V)
    adjusted_V = logits_V.copy()
    with np.errstate(over="ignore"):  # _put caps overflow, or it is a mask
        if sampling.logit_bias:
            ids = np.fromiter(sampling.logit_bias.keys(), dtype=np.int64)
            bias = np.fromiter(sampling.logit_bias.values(), dtype=np.float64)
            _put(adjusted_V, ids, adjusted_V[ids] + bias.astype(np.float32))
        if sampling.has_penalties:
            _penalize(adjusted_V, sampling, prefix)
    if masked:
        masked_M = np.array(masked, dtype=np.int64)
        adjusted_V[masked_M[masked_M < adjusted_V.size]] = -np.inf
    return adjusted_V if allowed_V is None else _only(adjusted_V, allowed_V)


def _only(logits_V: NDArray[np.float32], allowed_V: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.where(of_size(allowed_V, logits_V.size), logits_V, np.float32(-np.inf))


def of_size(allowed_V: NDArray[np.bool_], size: int) -> NDArray[np.bool_]:
    """A mask for `size` tokens: a draft model's row is cut to the target's vocabulary."""
    if allowed_V.size < size:
        allowed_V = np.pad(allowed_V, (0, size - allowed_V.size))
    return allowed_V[:size]


def _penalize(logits_V: NDArray[np.float32], sampling: SamplingParams, prefix: Prefix) -> None:
    """Apply penalties in place, by the counts of the text; tokens on the row's path add theirs."""
    counts = prefix.counts
    on_path = np.array(list(dict.fromkeys(prefix.path)), dtype=np.int64)
    before = logits_V[on_path]
    _penalize_at(logits_V, counts.ids_N, counts.outputs_N, sampling)
    if on_path.size:
        logits_V[on_path] = before
        _penalize_at(logits_V, on_path, outputs_on_path(prefix, on_path.tolist()), sampling)


def outputs_on_path(prefix: Prefix, token_ids: Sequence[int]) -> NDArray[np.int64]:
    """How often each of these ids occurs in the output before a row, including the row's path."""
    counts, on_path = prefix.counts, prefix.path_outputs
    outputs = [on_path[token_id] for token_id in token_ids]
    for index, token_id in enumerate(token_ids):
        place = counts.place_of(token_id)
        if place is not None:
            outputs[index] += int(counts.outputs_N[place])
    return np.array(outputs, dtype=np.int64)


def _penalize_at(
    logits_V: NDArray[np.float32],
    ids_N: NDArray[np.int64],
    outputs_N: NDArray[np.int64],
    sampling: SamplingParams,
) -> None:
    """Apply repetition to tokens that occur, then presence and frequency to those in the output.

    `ids_N`: different token ids; `outputs_N`: how often each occurs in the output.
    """
    if sampling.repetition_penalty != 1.0:
        penalty = np.float32(sampling.repetition_penalty)
        seen = logits_V[ids_N]
        _put(logits_V, ids_N, np.where(seen < 0, seen * penalty, seen / penalty))
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        in_output = outputs_N > 0
        ids, counts = ids_N[in_output], outputs_N[in_output]
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        _put(logits_V, ids, logits_V[ids] - penalties.astype(np.float32))


def _put(
    logits_V: NDArray[np.float32], ids: NDArray[np.int64], values: NDArray[np.float32]
) -> None:
    """Write values, capped at the largest float32: a huge bias must not become infinite."""
    logits_V[ids] = np.minimum(values, _FLOAT32.max)


def likeliest_token(logits_V: NDArray[np.float32]) -> int:
    """The argmax; the lowest id wins a tie. Raises InternalError if there is none."""
    token_id = int(logits_V.argmax())
    # argmax stops at a NaN, so one check covers every case.
    check_likeliest(token_id, float(logits_V[token_id]), logits_V.size)
    return token_id


def check_likeliest(token_id: int, largest: float, vocab_size: int) -> None:
    """Raise InternalError if `largest`, the logit of `token_id`, is not finite.

    Also raise it if `token_id` is not in the vocabulary.
    """
    if math.isfinite(largest):
        if 0 <= token_id < vocab_size:
            return
        raise InternalError(
            f"expected a token id below {vocab_size}, got {token_id}: the choice of a token went "
            "wrong"
        )
    if math.isnan(largest) or largest > 0:
        raise InternalError(
            f"expected finite logits, got {largest} for token {token_id}: the model's step went "
            "wrong (check the checkpoint's weights and dtype)"
        )
    raise InternalError(
        f"expected a token that can be chosen, got {vocab_size} masked tokens: the request's "
        "logit bias, min_tokens, bad words or structure, or the model, rule out the whole "
        "vocabulary"
    )


def log_weights_of(
    logits_N: NDArray[np.float32], largest: np.float32, sampling: SamplingParams
) -> NDArray[np.float32]:
    """Logs of probabilities, up to a constant, of some or all tokens of a row.

    `largest` is the largest logit of the whole row.
    """
    # The largest is subtracted first. Then no temperature, however small, causes overflow, and the
    # sums with the noise keep the noise's digits, however large the logits are.
    with np.errstate(over="ignore"):  # to -inf: such a token cannot win
        log_weights_N = logits_N - largest
        if sampling.temperature != 1.0:
            log_weights_N /= np.maximum(np.float32(sampling.temperature), _FLOAT32.tiny)
    return log_weights_N


def distribution_of(logits_V: NDArray[np.float32], sampling: SamplingParams) -> Distribution:
    """Apply temperature (above 0), top-k, top-p and min-p to adjusted logits.

    Raises InternalError if a logit is NaN or +inf, or all are -inf.
    """
    log_weights_V = log_weights_of(logits_V, logits_V[likeliest_token(logits_V)], sampling)
    kept = Distribution(None, log_weights_V)
    if 0 < sampling.top_k < log_weights_V.size:
        kept = _top_k(kept, sampling.top_k)
    if sampling.top_p < 1.0:
        kept = _top_p(kept, sampling.top_p)
    if sampling.min_p > 0.0:
        kept = kept.where(kept.log_weights >= np.float32(math.log(sampling.min_p)))
    return kept


def _top_k(before: Distribution, top_k: int) -> Distribution:
    """The tokens at least as likely as the k-th: more than k if several tie with it."""
    weights_N = before.log_weights
    for reach in _REACHES:
        near = weights_N[weights_N >= -reach]
        if near.size >= top_k:
            break
    kth = np.partition(near, near.size - top_k)[near.size - top_k]
    return before.where(weights_N >= kth)


def _top_p(before: Distribution, top_p: float) -> Distribution:
    """The fewest likeliest tokens whose probabilities sum to top_p; among ties, the lowest ids."""
    weights_N = np.exp(before.log_weights)
    wanted = top_p * float(weights_N.sum(dtype=np.float64))
    for reach in _REACHES:
        near = np.flatnonzero(before.log_weights >= -reach)
        near_weights = weights_N[near]
        if float(near_weights.sum(dtype=np.float64)) >= wanted * _CLEAR_MARGIN:
            break
    descending = np.sort(near_weights)[::-1]
    sums = np.cumsum(descending, dtype=np.float64)
    num_kept = min(int(np.searchsorted(sums, wanted)) + 1, near.size)
    smallest = descending[num_kept - 1]
    kept = near_weights > smallest
    ties = np.flatnonzero(near_weights == smallest)
    kept[ties[: num_kept - int(np.count_nonzero(kept))]] = True
    return before.at(near[kept])


def probabilities_of(
    adjusted_V: NDArray[np.float32], sampling: SamplingParams
) -> NDArray[np.float64]:
    """The float64 probabilities [V] of adjusted logits; at temperature 0 the likeliest token has 1.

    Raises as distribution_of does.
    """
    probs_V = np.zeros(adjusted_V.size, dtype=np.float64)
    if sampling.greedy:
        probs_V[likeliest_token(adjusted_V)] = 1.0
        return probs_V
    kept = distribution_of(adjusted_V, sampling)
    weights_N = np.exp(kept.log_weights, dtype=np.float64)
    weights_N /= weights_N.sum()
    if kept.token_ids is None:
        return weights_N
    probs_V[kept.token_ids] = weights_N
    return probs_V


class WindowRows:
    """Rows of float32 logits [1 + candidates, V]: row n follows `prefix` and node n's path.

    They are an array or a CPU tensor, and are not changed. Raises InternalError if they have
    another shape or dtype, or if penalties apply and a token id is outside the vocabulary.
    """

    def __init__(
        self,
        logits_RV: Logits,
        tree: CandidateTree,
        spec: SequenceSpec,
        prefix: Sequence[int],
    ) -> None:
        self._rows_RV = _as_numpy(logits_RV, len(tree))
        self.tree = tree
        self.spec = spec
        self._prefix = Prefix.of(prefix, prompt_length=spec.prompt_length)
        if depends_on_tokens(spec.sampling):
            own = np.array((*self._prefix.path, *tree.token_ids), dtype=np.int64)
            for ids in (self._prefix.counts.ids_N, own):
                _check_ids(ids, self.vocab_size)

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self._rows_RV.shape[1])

    def position(self, accepted: Sequence[int]) -> int:
        """The position of the token after these candidates."""
        return len(self._prefix) + len(accepted)

    def adjusted_V(self, node: int, accepted: Sequence[int]) -> NDArray[np.float32]:
        """A node's logits after bias, penalties and masks.

        `accepted` are the candidates from the root to the node, including the node's own. A
        function of this row only, so it is equal in every window and batch.
        """
        prefix = self._prefix.followed_by(self.tree.tokens_of(accepted))
        return adjusted_logits(self._rows_RV[node], self.spec, prefix)


def _as_numpy(logits_RV: Logits, num_candidates: int) -> NDArray[np.float32]:
    """The logits as a numpy view, after checks of what a caller could get wrong."""
    dtype, shape = logits_RV.dtype, logits_RV.shape
    if dtype not in (np.float32, torch.float32) or len(shape) != 2 or shape[1] == 0:
        raise InternalError(
            f"expected float32 logits [1 + window, V], got {dtype} {list(shape)}: convert them "
            "after the LM head"
        )
    if shape[0] != 1 + num_candidates:
        raise InternalError(
            f"expected {1 + num_candidates} rows of logits for {num_candidates} candidates, got "
            f"{shape[0]}: ask the engine for 1 + window rows"
        )
    return logits_RV if isinstance(logits_RV, np.ndarray) else logits_RV.detach().numpy()


def _check_ids(ids: NDArray[np.int64], vocab_size: int) -> None:
    """Raise InternalError if a token id is outside the vocabulary."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise InternalError(
            f"expected token ids below {vocab_size}, got {int(outside[0])}: drafter and target "
            "must share one vocabulary"
        )
