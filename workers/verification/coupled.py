"""Coupled verification (ALGORITHMS.md section 3): target and drafter share the noise of a position.

The token at a position is argmax(log target_probs + noise): an exact sample of the target's
distribution that depends on nothing but the tokens before it and the request's seed. A candidate
is accepted while it is that token. So the text is that of plain decoding, whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import InternalError
from paceline.sampling import SequenceSpec
from workers.verification.distribution import (
    Distribution,
    adjusted_logits,
    depends_on_tokens,
    distribution_of,
    likeliest_token,
)
from workers.verification.noise import GUMBEL_SPAN, LANES, gumbel_noise_of, gumbel_noise_V
from workers.verification.verdict import Verdict


def choose_token(logits_V: torch.Tensor, spec: SequenceSpec, prefix: Sequence[int]) -> int:
    """The token after `prefix`, which is all token ids so far, prompt included.

    `logits_V` is a float32 CPU tensor [V], the target's or a drafter's own; it is not changed.
    Raises InternalError where a logit is NaN or +inf, or where every token is masked.
    """
    return verify_chain(logits_V[None], (), spec, prefix).token_id


def verify_chain(
    logits_TV: torch.Tensor,
    candidates: Sequence[int],
    spec: SequenceSpec,
    prefix: Sequence[int],
) -> Verdict:
    """Accept candidates while they are the target's tokens, and add the target's next one.

    `logits_TV` is a float32 CPU tensor [1 + window, V]; row i follows prefix + candidates[:i].
    Rows after the first mismatch are not looked at. Raises as choose_token does.
    """
    rows_TV = _rows(logits_TV, len(candidates))
    # Row i sees the first len(prefix) + i of these: its own, hypothetical, prefix.
    ids = np.empty(0, dtype=np.int64)
    if depends_on_tokens(spec.sampling):
        ids = np.array([*prefix, *candidates], dtype=np.int64)
        _check_ids(ids, rows_TV.shape[1])
    for index, candidate in enumerate(candidates):
        position = len(prefix) + index
        token_id = _choose(rows_TV[index], spec, position, ids[:position])
        if token_id != candidate:
            return Verdict(index, token_id)
    position = len(prefix) + len(candidates)
    return Verdict(len(candidates), _choose(rows_TV[-1], spec, position, ids))


def _choose(
    logits_V: NDArray[np.float32],
    spec: SequenceSpec,
    position: int,
    prefix_ids_P: NDArray[np.int64],
) -> int:
    """The token at `position`: a function of this row alone, so equal in every window and batch."""
    adjusted_V = adjusted_logits(logits_V, spec, position, prefix_ids_P)
    if spec.sampling.greedy:
        return likeliest_token(adjusted_V)
    kept = distribution_of(adjusted_V, spec.sampling)
    kept = _that_can_win(kept)
    scores_N = kept.log_weights + _noise(kept, adjusted_V.size, spec, position)
    winner = int(scores_N.argmax())  # ids ascend, so the lowest id wins a tie
    return winner if kept.token_ids is None else int(kept.token_ids[winner])


def _that_can_win(kept: Distribution) -> Distribution:
    """Without the tokens that no noise can lift above the likeliest, where that spares noise."""
    reachable_N = kept.log_weights >= -GUMBEL_SPAN
    if LANES * int(np.count_nonzero(reachable_N)) < kept.log_weights.size:
        return kept.where(reachable_N)
    return kept


def _noise(
    kept: Distribution, vocab_size: int, spec: SequenceSpec, position: int
) -> NDArray[np.float32]:
    """The noise of the kept tokens: theirs alone, or cut from the whole vocabulary's."""
    ids_N = kept.token_ids
    if ids_N is not None and LANES * ids_N.size < vocab_size:
        return gumbel_noise_of(
            ids_N, seed=spec.seed, position=position, sample_index=spec.sample_index
        )
    noise_V = gumbel_noise_V(
        seed=spec.seed,
        position=position,
        vocab_size=vocab_size,
        sample_index=spec.sample_index,
    )
    return noise_V if ids_N is None else noise_V[ids_N]


def _rows(logits_TV: torch.Tensor, num_candidates: int) -> NDArray[np.float32]:
    """The logits as a numpy view, after checks of what a caller could get wrong."""
    if logits_TV.dtype != torch.float32 or logits_TV.dim() != 2 or logits_TV.shape[1] == 0:
        raise InternalError(
            f"expected float32 logits [1 + window, V], got {logits_TV.dtype} "
            f"{list(logits_TV.shape)}: convert them after the LM head"
        )
    if logits_TV.shape[0] != 1 + num_candidates:
        raise InternalError(
            f"expected {1 + num_candidates} rows of logits for {num_candidates} candidates, got "
            f"{logits_TV.shape[0]}: ask the engine for 1 + window rows"
        )
    rows_TV: NDArray[np.float32] = logits_TV.detach().numpy()
    return rows_TV


def _check_ids(ids: NDArray[np.int64], vocab_size: int) -> None:
    """Raise InternalError where a token id is outside the vocabulary."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise InternalError(
            f"expected token ids below {vocab_size}, got {int(outside[0])}: drafter and target "
            "must share one vocabulary"
        )
