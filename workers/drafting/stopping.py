"""The rules for when a drafter stops: small state machines without I/O or clock.

A drafter describes each drafted token by a TokenSignal, calls `should_stop` after each, and passes
`learn` the verdict on a draft. The test looks at tokens that have been drafted, and stops the
drafting of *further* ones: every token it looked at is sent. Dropping one would bias the output
under every rule that needs draft probabilities. At least one token is drafted, since otherwise no
rule could learn that drafting has become worthwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.rules import Stopping
from workers.drafting.acceptance_map import AcceptanceMap, TokenSignal


@dataclass(frozen=True, slots=True)
class Prices:
    """What time buys at present.

    `tokens_per_ms`: the rate at which the sequence commits. `draft_ms`: milliseconds that one more
    draft token takes (0 while the target is busy anyway). `step_ms_per_candidate`: milliseconds
    that it adds to the target's step.
    """

    tokens_per_ms: float
    draft_ms: float
    step_ms_per_candidate: float


class StoppingRule(Protocol):
    """One drafter's rule for one sequence. It judges drafts of at least one token."""

    def should_stop(self, drafted: Sequence[TokenSignal], prices: Prices) -> bool:
        """Whether to draft nothing after `drafted`, the tokens since the last committed one.

        All of them are sent, including the last one.
        """
        ...

    def learn(self, drafted: Sequence[TokenSignal], num_accepted: int, *, longest: int) -> None:
        """Learn from the verdict on a chain, or on the path of a tree that it followed.

        `longest`: the longest draft that was allowed, in tokens.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """The state, for the metrics of a request."""
        ...


@dataclass(slots=True)
class AdaEdl:
    """AdaEDL (Agrawal et al. 2024): an entropy bound on acceptance, compared to a threshold.

    The threshold follows the acceptance rate. It ignores what a token costs. It moves by a
    thousandth per draft, so all sequences of a drafter share one threshold.
    """

    threshold: float = 0.4
    acceptance_rate: float = 0.9
    entropy_factor: float = 0.2
    inertia: float = 0.9
    nudge: float = 0.01
    wanted_rate: float = 0.9

    def should_stop(self, drafted: Sequence[TokenSignal], prices: Prices) -> bool:
        return 1 - math.sqrt(self.entropy_factor * drafted[-1].entropy) < self.threshold

    def learn(self, drafted: Sequence[TokenSignal], num_accepted: int, *, longest: int) -> None:
        self.acceptance_rate = 0.5 * self.acceptance_rate + 0.5 * num_accepted / len(drafted)
        nudged = self.threshold
        if self.acceptance_rate < self.wanted_rate:
            nudged += self.nudge
        elif num_accepted != longest:
            nudged -= self.nudge
        self.threshold = self.inertia * self.threshold + (1 - self.inertia) * nudged

    def metrics(self) -> Mapping[str, float]:
        return {"threshold": self.threshold, "acceptance_rate": self.acceptance_rate}


@dataclass(slots=True)
class Confidence:
    """Stop when the product of the draft probabilities falls below a threshold.

    The product estimates the probability that all drafted tokens are accepted.
    """

    threshold: float = 0.3
    last_product: float = 1.0

    def should_stop(self, drafted: Sequence[TokenSignal], prices: Prices) -> bool:
        self.last_product = math.prod(signal.draft_prob for signal in drafted)
        return self.last_product < self.threshold

    def learn(self, drafted: Sequence[TokenSignal], num_accepted: int, *, longest: int) -> None:
        """Do nothing: the threshold is fixed."""

    def metrics(self) -> Mapping[str, float]:
        return {"threshold": self.threshold, "confidence": self.last_product}


@dataclass(slots=True)
class CostAware:
    """Stop when the next token's expected gain falls below its price.

    The gain is the probability that it and all tokens before it are accepted: the map's estimates
    for the drafted tokens, times its mean for the next one. The price is the number of tokens that
    could be committed in the time of drafting and verifying it.
    """

    acceptance: AcceptanceMap
    last_gain: float = 1.0
    last_price: float = 0.0

    def should_stop(self, drafted: Sequence[TokenSignal], prices: Prices) -> bool:
        reached = math.prod(self.acceptance.estimate(signal) for signal in drafted)
        self.last_gain = reached * self.acceptance.mean
        self.last_price = prices.tokens_per_ms * (prices.draft_ms + prices.step_ms_per_candidate)
        return self.last_gain < self.last_price

    def learn(self, drafted: Sequence[TokenSignal], num_accepted: int, *, longest: int) -> None:
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


class DrafterStopping:
    """A drafter's stopping rules. What they learned of its two models outlives a sequence."""

    def __init__(self) -> None:
        self._acceptance = AcceptanceMap()
        self._adaedl = AdaEdl()

    def rule(self, name: Stopping) -> StoppingRule | None:
        """The rule of a new sequence. None for `fixed`: the grant alone bounds a draft."""
        match name:
            case Stopping.FIXED:
                return None
            case Stopping.ADAEDL:
                return self._adaedl
            case Stopping.CONFIDENCE:
                return Confidence()
            case Stopping.COST:
                return CostAware(self._acceptance)
