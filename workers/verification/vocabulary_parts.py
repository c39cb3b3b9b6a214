"""The coupled rule's token of a row whose logits are split among holders, a run of ids each.

argmax(log weight + noise) needs no sum over the vocabulary. So each holder can name its best token
and the token's score, and the best of these is the row's token. The arithmetic of every token is
that of distribution.py and choice.py, so that scores are bit-equal to theirs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.sampling import SequenceSpec
from workers.verification.distribution import log_weights_of
from workers.verification.noise import GUMBEL_SPAN, Stream, gumbel, words_of, words_of_part
from workers.verification.philox import LANES
from workers.verification.rule import rule_named


def parts_suffice(spec: SequenceSpec) -> bool:
    """Whether a row's token follows from each part's best, because nothing needs the whole row."""
    sampling = spec.sampling
    if not rule_named(spec.rule).shares_noise or sampling.has_penalties or sampling.logit_bias:
        return False
    if sampling.min_tokens > 0:
        return False
    filters = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return sampling.greedy or not filters


def best_score(
    logits_N: NDArray[np.float32],
    largest: np.float32,
    token_ids: range,
    spec: SequenceSpec,
    position: int,
) -> tuple[float, int]:
    """Score and id of a part's best token, at a temperature above 0. `largest`: of the row."""
    log_weights_N = log_weights_of(logits_N, largest, spec.sampling)
    stream = Stream(spec.seed, position, spec.sample_index)
    indices = np.flatnonzero(log_weights_N >= -GUMBEL_SPAN)
    if not indices.size:
        return -np.inf, token_ids.start
    if LANES * indices.size < log_weights_N.size:
        words_N = words_of(stream, indices + token_ids.start)
    else:
        words_N = words_of_part(stream, token_ids)[indices]
    scores_N = log_weights_N[indices] + gumbel(words_N)
    winner = int(scores_N.argmax())  # ids ascend, so the lowest id wins a tie
    return float(scores_N[winner]), token_ids.start + int(indices[winner])
