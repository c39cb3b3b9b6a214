"""When a drafter stops (ALGORITHMS.md section 4): small state machines without I/O or clock.

A drafter describes each drafted token by a TokenSignal, asks `should_stop` after each, and tells
`learn` what the verdict made of a draft. The test looks at tokens that have been drafted, and
stops the drafting of *further* ones: whatever it looked at is sent. To drop it would bias the
output under every rule that needs draft probabilities. At least one token is drafted, else no
rule could learn that drafting has become worth while.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.rules import Stopping


@dataclass(frozen=True, slots=True)
class TokenSignal:
    """What is known of a drafted token before its verdict, from the drafter's softmax at T = 1.

    `entropy` in nats; `margin` is the likeliest token's probability less the second's;
    `draft_prob` is that of the drafted token.
    """

    entropy: float
    margin: float
    draft_prob: float


@dataclass(frozen=True, slots=True)
class Prices:
    """What time buys at present, in milliseconds.

    `tokens_per_ms` is the rate at which the sequence commits; `draft_ms` one further draft token
    (0 while the target is busy anyway); `step_ms_per_candidate` what it adds to the target's step.
    """

    tokens_per_ms: float
    draft_ms: float
    step_ms_per_candidate: float


class StoppingRule(Protocol):
    """One drafter's rule for one sequence."""

    def should_stop(self, drafted: Sequence[TokenSignal], prices: Prices) -> bool:
        """Whether to draft nothing after these, the tokens since the last committed one.

        All of them are sent, the last one too.
        """
        ...

    def learn(self, drafted: Sequence[TokenSignal], num_accepted: int) -> None:
        """The verdict on a chain, or on the path of a tree that it followed."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """The state, for the metrics of a request."""
        ...


def signal_of(logits_V: NDArray[np.float32], token_id: int) -> TokenSignal:
    """The signal of a token drafted from these logits, which have no NaN and are not all -inf.

    The temperature of the request is not applied: at 0 there would be nothing to see.
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


@dataclass(slots=True)
class FixedLength:
    """Always the same number of tokens."""

    length: int

    def should_stop(self, drafted: Sequence[TokenSignal], prices: Prices) -> bool:
        return len(drafted) >= max(self.length, 1)

    def learn(self, drafted: Sequence[TokenSignal], num_accepted: int) -> None:
        """Nothing to learn."""

    def metrics(self) -> Mapping[str, float]:
        return {"length": float(self.length)}


@dataclass(slots=True)
class AdaEdl:
    """AdaEDL (Agrawal et al. 2024): an entropy bound on acceptance against a threshold.

    The threshold follows the acceptance rate; what a token costs it does not know. `longest` is
    the longest draft allowed, in tokens.
    """

    longest: int
    threshold: float = 0.4
    acceptance_rate: float = 0.9
    entropy_factor: float = 0.2
    inertia: float = 0.9
    nudge: float = 0.01
    wanted_rate: float = 0.9

    def should_stop(self, drafted: Sequence[TokenSignal], prices: Prices) -> bool:
        if not drafted:
            return False
        bound = 1 - math.sqrt(self.entropy_factor * drafted[-1].entropy)
        return len(drafted) >= self.longest or bound < self.threshold

    def learn(self, drafted: Sequence[TokenSignal], num_accepted: int) -> None:
        if not drafted:
            return
        self.acceptance_rate = 0.5 * self.acceptance_rate + 0.5 * num_accepted / len(drafted)
        nudged = self.threshold
        if self.acceptance_rate < self.wanted_rate:
            nudged += self.nudge
        elif num_accepted != self.longest:
            nudged -= self.nudge
        self.threshold = self.inertia * self.threshold + (1 - self.inertia) * nudged

    def metrics(self) -> Mapping[str, float]:
        return {"threshold": self.threshold, "acceptance_rate": self.acceptance_rate}


@dataclass(slots=True)
class Confidence:
    """Stop when the probability that all drafted tokens are accepted, estimated as the product of
    their draft probabilities, falls below a threshold.
    """

    longest: int
    threshold: float = 0.3
    last_product: float = 1.0

    def should_stop(self, drafted: Sequence[TokenSignal], prices: Prices) -> bool:
        if not drafted:
            return False
        self.last_product = math.prod(signal.draft_prob for signal in drafted)
        return len(drafted) >= self.longest or self.last_product < self.threshold

    def learn(self, drafted: Sequence[TokenSignal], num_accepted: int) -> None:
        """Nothing to learn."""

    def metrics(self) -> Mapping[str, float]:
        return {"threshold": self.threshold, "confidence": self.last_product}


_ENTROPY_EDGES = np.array([0.05, 0.2, 0.5, 1.0, 1.6, 2.4, 3.5])
_MARGIN_EDGES = np.array([0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95])
_SCALE_WEIGHT = 0.5
"""Refusals that the acceptance map's bound is taken to have predicted rightly at the start."""
_PRIOR_ENTROPIES = np.array([0.02, 0.1, 0.35, 0.75, 1.3, 2.0, 2.9, 4.5])


class AcceptanceMap:
    """The share of drafted tokens that were accepted, by bins of entropy and margin; one a drafter.

    A bin begins as AdaEDL's entropy bound, weighed as `prior_weight` observations, and what it
    has seen fades by `fading` with each new observation in it, so that the map follows the text.
    The bound knows nothing of the pair of models: what it says of refusals is scaled, in all bins
    alike, by the refusals seen over those that it made expect.
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
        """The probability, above 0 and below 1, that a token is accepted given those before it."""
        at = self._bin(signal)
        refusal = min(0.95, float(self._prior_refusal[at]) * self._refused / self._expected_refused)
        accepted = float(self._accepted[at]) + (1 - refusal) * self._prior_weight
        return accepted / float(self._tested[at] + self._prior_weight)

    @property
    def mean(self) -> float:
        """The same for a token of which nothing is known yet."""
        return self._mean_accepted / self._mean_tested

    def observe(self, signal: TokenSignal, *, accepted: bool) -> None:
        """A token that was tested. Those after the first refusal were not."""
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
        """Observations that have not faded."""
        return float(self._tested.sum())

    def _bin(self, signal: TokenSignal) -> tuple[int, int]:
        entropy_bin = int(np.searchsorted(_ENTROPY_EDGES, signal.entropy))
        return entropy_bin, int(np.searchsorted(_MARGIN_EDGES, signal.margin))


@dataclass(slots=True)
class CostAware:
    """Stop when the next token's expected gain falls below its price.

    The gain is the probability that it and all before it are accepted: the map's estimates of
    those drafted, and its mean for the next one. The price is what could be committed in the time
    that drafting and verifying it takes.
    """

    longest: int
    acceptance: AcceptanceMap
    last_gain: float = 1.0
    last_price: float = 0.0

    def should_stop(self, drafted: Sequence[TokenSignal], prices: Prices) -> bool:
        if not drafted:
            return False
        reached = math.prod(self.acceptance.estimate(signal) for signal in drafted)
        self.last_gain = reached * self.acceptance.mean
        self.last_price = prices.tokens_per_ms * (prices.draft_ms + prices.step_ms_per_candidate)
        return len(drafted) >= self.longest or self.last_gain < self.last_price

    def learn(self, drafted: Sequence[TokenSignal], num_accepted: int) -> None:
        for signal in drafted[:num_accepted]:
            self.acceptance.observe(signal, accepted=True)
        for signal in drafted[num_accepted : num_accepted + 1]:
            self.acceptance.observe(signal, accepted=False)

    def metrics(self) -> Mapping[str, float]:
        return {
            "gain": self.last_gain,
            "price": self.last_price,
            "acceptance_rate": self.acceptance.mean,
            "observed": self.acceptance.num_observed,
        }


def stopping_rule(
    name: Stopping, *, longest: int, acceptance: AcceptanceMap | None = None
) -> StoppingRule:
    """A rule for a new sequence; `acceptance` is its drafter's map, which the cost rule fits."""
    match name:
        case Stopping.FIXED:
            return FixedLength(longest)
        case Stopping.ADAEDL:
            return AdaEdl(longest)
        case Stopping.CONFIDENCE:
            return Confidence(longest)
        case Stopping.COST:
            return CostAware(longest, acceptance or AcceptanceMap())
