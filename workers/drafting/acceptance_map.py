"""Estimates how likely a drafted token is to be accepted, from the drafter's distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ENTROPY_EDGES = np.array([0.05, 0.2, 0.5, 1.0, 1.6, 2.4, 3.5])
_MARGIN_EDGES = np.array([0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95])
_SCALE_WEIGHT = 0.5
"""Weight of the prior: the map starts as if it had predicted this number of refusals rightly."""
_PRIOR_ENTROPIES = np.array([0.02, 0.1, 0.35, 0.75, 1.3, 2.0, 2.9, 4.5])


@dataclass(frozen=True, slots=True)
class TokenSignal:
    """What the drafter's softmax at temperature 1 says of a drafted token, before its verdict.

    `entropy` is in nats. `margin` is the likeliest token's probability minus the second's.
    `draft_prob` is the probability of the drafted token.
    """

    entropy: float
    margin: float
    draft_prob: float


def signal_of(logits_V: NDArray[np.float32], token_id: int) -> TokenSignal:
    """The signal of `token_id`, drafted from `logits_V` (float32 [V], no NaN, not all -inf).

    The request's temperature is not applied: at 0, all signals would be equal.
    """
    log_weights_V = np.maximum(logits_V - logits_V.max(), np.float32(-1e4))
    weights_V = np.exp(log_weights_V)
    total = float(weights_V.sum())
    entropy = math.log(total) - float(np.dot(weights_V, log_weights_V)) / total
    margin = 1.0 / total
    if weights_V.size > 1:
        largest_2 = np.partition(weights_V, weights_V.size - 2)[-2:]
        margin = float(largest_2[1] - largest_2[0]) / total
    return TokenSignal(max(entropy, 0.0), margin, float(weights_V[token_id]) / total)


class AcceptanceMap:
    """The share of drafted tokens that were accepted, by bins of entropy and margin. One per
    drafter.

    A bin starts at AdaEDL's entropy bound (Agrawal et al. 2024), weighted as `prior_weight`
    observations. Each new observation in a bin multiplies the older ones by `fading`, so that the
    map follows the text. The bound knows nothing of the two models, so its refusal probability is
    scaled, in all bins alike, by the ratio of seen refusals to expected ones.
    """

    def __init__(self, *, prior_weight: float = 4.0, fading: float = 0.995) -> None:
        shape = (_ENTROPY_EDGES.size + 1, _MARGIN_EDGES.size + 1)
        bound = np.clip(1 - np.sqrt(0.2 * _PRIOR_ENTROPIES), 0.05, 0.95)
        self._prior_weight = prior_weight
        self._fading = fading
        self._prior_refusal = np.broadcast_to(1 - bound[:, None], shape)
        self._refused = self._expected_refused = _SCALE_WEIGHT
        self._tested = np.zeros(shape)
        self._accepted = np.zeros(shape)
        self._mean_tested = prior_weight
        self._mean_accepted = 0.7 * prior_weight

    def estimate(self, signal: TokenSignal) -> float:
        """The probability, above 0 and below 1, that a token is accepted if all before it are."""
        at = self._bin(signal)
        refusal = min(0.95, float(self._prior_refusal[at]) * self._refused / self._expected_refused)
        accepted = float(self._accepted[at]) + (1 - refusal) * self._prior_weight
        return accepted / float(self._tested[at] + self._prior_weight)

    @property
    def mean(self) -> float:
        """The same probability for a token that has not been drafted yet."""
        return self._mean_accepted / self._mean_tested

    def observe(self, signal: TokenSignal, *, accepted: bool) -> None:
        """Note a token that the target tested. Tokens after the first refusal were not tested."""
        at = self._bin(signal)
        self._refused = self._refused * self._fading + (not accepted)
        self._expected_refused = self._expected_refused * self._fading + float(
            self._prior_refusal[at]
        )
        self._tested[at] = self._tested[at] * self._fading + 1
        self._accepted[at] = self._accepted[at] * self._fading + accepted
        self._mean_tested = self._mean_tested * self._fading + 1
        self._mean_accepted = self._mean_accepted * self._fading + accepted

    @property
    def num_observed(self) -> float:
        """The number of observations, each weighted by how much it has faded."""
        return float(self._tested.sum())

    def _bin(self, signal: TokenSignal) -> tuple[int, int]:
        entropy_bin = int(np.searchsorted(_ENTROPY_EDGES, signal.entropy))
        return entropy_bin, int(np.searchsorted(_MARGIN_EDGES, signal.margin))
