"""Drawing a token with the noise of a position: argmax(log probabilities + Gumbel noise)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.sampling import SequenceSpec
from workers.verification.distribution import Distribution
from workers.verification.noise import (
    GUMBEL_SPAN,
    LANES,
    Purpose,
    gumbel_noise_of,
    gumbel_noise_V,
)


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
    scores_N = kept.log_weights + noise_of(
        kept, vocab_size, spec, position, purpose=purpose, candidate=candidate
    )
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
    """The noise of the kept tokens: theirs alone, or cut from the whole vocabulary's."""
    ids_N = kept.token_ids
    if ids_N is not None and LANES * ids_N.size < vocab_size:
        return gumbel_noise_of(
            ids_N,
            seed=spec.seed,
            position=position,
            sample_index=spec.sample_index,
            purpose=purpose,
            candidate=candidate,
        )
    noise_V = gumbel_noise_V(
        seed=spec.seed,
        position=position,
        vocab_size=vocab_size,
        sample_index=spec.sample_index,
        purpose=purpose,
        candidate=candidate,
    )
    return noise_V if ids_N is None else noise_V[ids_N]


def _that_can_win(kept: Distribution) -> Distribution:
    """Without the tokens that no noise can lift above the likeliest, where that spares noise."""
    reachable_N = kept.log_weights >= -GUMBEL_SPAN
    if LANES * int(np.count_nonzero(reachable_N)) < kept.log_weights.size:
        return kept.where(reachable_N)
    return kept
