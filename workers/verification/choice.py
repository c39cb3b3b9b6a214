"""Drawing a token with the noise of a position: argmax(log probabilities + Gumbel noise)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.sampling import SequenceSpec
from workers.verification.distribution import Distribution
from workers.verification.noise import (
    GUMBEL_SPAN,
    Purpose,
    Stream,
    best_scores,
    gumbel,
    words_of,
    words_V,
)
from workers.verification.philox import LANES

_FEW = 4096
"""Of so few tokens all scores are computed; of more, those that a cheap bound leaves."""


def choose_from(
    kept: Distribution,
    vocab_size: int,
    spec: SequenceSpec,
    position: int,
    *,
    purpose: Purpose = Purpose.COUPLED,
    candidate: int = 0,
) -> int:
    """A token of the distribution: an exact sample, a pure function of the arguments."""
    kept = _that_can_win(kept)
    stream = Stream(spec.seed, position, spec.sample_index, purpose, candidate)
    words_N = _words(kept, vocab_size, stream)
    if words_N.size > _FEW:
        best = best_scores(kept.log_weights, words_N)
        kept, words_N = kept.at(best), words_N[best]
    scores_N = kept.log_weights + gumbel(words_N)
    winner = int(scores_N.argmax())  # ids ascend, so the lowest id wins a tie
    return winner if kept.token_ids is None else int(kept.token_ids[winner])


def draw(
    probs_V: NDArray[np.float64],
    spec: SequenceSpec,
    position: int,
    *,
    purpose: Purpose,
    candidate: int = 0,
) -> int:
    """A token of float64 probabilities [V], known up to a factor."""
    token_ids = np.flatnonzero(probs_V > 0)
    weights_N = probs_V[token_ids]
    log_weights_N = np.log(weights_N / weights_N.max()).astype(np.float32)
    return choose_from(
        Distribution(token_ids, log_weights_N),
        probs_V.size,
        spec,
        position,
        purpose=purpose,
        candidate=candidate,
    )


def noise_of(
    kept: Distribution,
    vocab_size: int,
    spec: SequenceSpec,
    position: int,
    *,
    purpose: Purpose = Purpose.COUPLED,
    candidate: int = 0,
) -> NDArray[np.float32]:
    """The noise of the kept tokens."""
    stream = Stream(spec.seed, position, spec.sample_index, purpose, candidate)
    return gumbel(_words(kept, vocab_size, stream))


def _words(kept: Distribution, vocab_size: int, stream: Stream) -> NDArray[np.uint32]:
    """The words of the kept tokens: theirs alone, or cut from the whole vocabulary's."""
    ids_N = kept.token_ids
    if ids_N is not None and LANES * ids_N.size < vocab_size:
        return words_of(stream, ids_N)
    all_V = words_V(stream, vocab_size)
    return all_V if ids_N is None else all_V[ids_N]


def _that_can_win(kept: Distribution) -> Distribution:
    """Without the tokens that no noise can lift above the likeliest, where that spares noise."""
    reachable_N = kept.log_weights >= -GUMBEL_SPAN
    if LANES * int(np.count_nonzero(reachable_N)) < kept.log_weights.size:
        return kept.where(reachable_N)
    return kept
