"""The rules for when a drafter stops: small state machines without I/O or clock.

A drafter describes each drafted token by a TokenSignal, calls `should_stop` after each token, and
passes the verdict on a draft to `learn`. The test looks at tokens that have been drafted, and stops
the drafting of *further* ones. Every token that it looked at is sent: dropping one would bias the
output under every rule that needs draft probabilities. At least one token is drafted, since
otherwise no rule could learn that drafting has become worthwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.options import Stopping
from workers.drafting.tree import DraftTree, Grant, Kept

if TYPE_CHECKING:
    import torch


_ENTROPY_EDGES = np.array([0.05, 0.2, 0.5, 1.0, 1.6, 2.4, 3.5])
_MARGIN_EDGES = np.array([0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95])
_SCALE_WEIGHT = 0.5
"""The number of refusals, expected and seen alike, with which an AcceptanceMap starts."""
_PRIOR_ENTROPIES = np.array([0.02, 0.1, 0.35, 0.75, 1.3, 2.0, 2.9, 4.5])


@dataclass(frozen=True, slots=True)
class TokenSignal:
    """Numbers of the drafter's softmax at temperature 1 about a token that it drafted.

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
    """The share of drafted tokens that were accepted, by bins of entropy and margin.

    A drafter has one map. A bin starts at AdaEDL's entropy bound (Agrawal et al. 2024), weighted as
    `prior_weight` observations. Each new observation in a bin multiplies the older ones by
    `fading`, so that the map follows the text. The bound does not depend on the two models, so its
    refusal probability is multiplied, in all bins, by the ratio of seen to expected refusals.
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
        """The sum of the observations' weights after fading."""
        return float(self._tested.sum())

    def _bin(self, signal: TokenSignal) -> tuple[int, int]:
        entropy_bin = int(np.searchsorted(_ENTROPY_EDGES, signal.entropy))
        return entropy_bin, int(np.searchsorted(_MARGIN_EDGES, signal.margin))


class StoppingRule(Protocol):
    """One drafter's rule for one sequence. It judges drafts of at least one token."""

    def should_stop(self, drafted: Sequence[TokenSignal], price: float) -> bool:
        """Whether to draft nothing after `drafted`, the tokens since the last committed one.

        All of them are sent, including the last one. `price`: the tokens that could be committed in
        the time of drafting and verifying one more.
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

    The threshold follows the acceptance rate, and ignores what a token costs. It moves by a
    thousandth per draft: too slowly for one sequence, so all sequences of a drafter share it.
    """

    threshold: float = 0.4
    acceptance_rate: float = 0.9
    entropy_factor: float = 0.2
    inertia: float = 0.9
    nudge: float = 0.01
    wanted_rate: float = 0.9

    def should_stop(self, drafted: Sequence[TokenSignal], price: float) -> bool:
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

    def should_stop(self, drafted: Sequence[TokenSignal], price: float) -> bool:
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
    for the drafted tokens, times its mean for the next one.
    """

    acceptance: AcceptanceMap
    last_gain: float = 1.0
    last_price: float = 0.0

    def should_stop(self, drafted: Sequence[TokenSignal], price: float) -> bool:
        reached = math.prod(self.acceptance.estimate(signal) for signal in drafted)
        self.last_gain = reached * self.acceptance.mean
        self.last_price = price
        return self.last_gain < price

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
    """A drafter's stopping rules. What they learned about the two models outlives a sequence."""

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


class Stopper:
    """Decides under which nodes nothing more is drafted. Under the rule `fixed` it never stops.

    It looks only at tokens that are in the tree, which are sent in any case: its decisions never
    drop a token.
    """

    def __init__(self, stopping: Stopping, shared: DrafterStopping) -> None:
        self.rule = shared.rule(stopping)
        self.stopped: set[int] = set()
        """The nodes below which nothing is drafted before the next outcome."""
        self._signals: dict[int, TokenSignal] = {}
        self._kept = 0
        self._is_told = False

    @property
    def watches(self) -> bool:
        return self.rule is not None

    def signals(self, logits_V: torch.Tensor, token_ids: Sequence[int]) -> list[TokenSignal]:
        logits = logits_V.numpy()
        first = signal_of(logits, token_ids[0])
        return [first] + [
            TokenSignal(
                first.entropy,
                first.margin,
                first.draft_prob * math.exp(min(float(logits[one] - logits[token_ids[0]]), 80.0)),
            )
            for one in token_ids[1:]
        ]

    def note(self, node: int, signal: TokenSignal) -> None:
        self._signals[node] = signal

    def stops(self, tree: DraftTree, node: int, pass_ms: float) -> bool:
        """Whether to draft nothing below a node. A "yes" holds until the next outcome."""
        if self.rule is None:
            return False
        if node in self.stopped:
            return True
        return self.stops_below(node, tree.path_to(node), tree.grant, pass_ms=pass_ms)

    def stops_below(self, node: int, path: Sequence[int], grant: Grant, *, pass_ms: float) -> bool:
        """As `stops`, for the last node of `path`, which need not be in the tree yet."""
        stops = self.stops_after(path, grant, pass_ms=pass_ms)
        if stops:
            self.stopped.add(node)
        return stops

    def stops_after(self, path: Sequence[int], grant: Grant, *, pass_ms: float) -> bool:
        """Whether to draft nothing after the nodes of `path`, a path from the root.

        After the root itself at least one token is drafted. The rules that ignore cost judge only
        nodes drafted since the last outcome: as published, a draft begins anew after a verdict, so
        nodes that an outcome kept do not count. These rules are made for drafts that the target
        waits for. While drafting is free they end no draft, since the drafter would only be idle.
        """
        by_cost = isinstance(self.rule, CostAware)
        if not by_cost:
            path = [node for node in path if node > self._kept]
        if self.rule is None or not path:
            return False
        draft_ms = 0.0 if grant.drafting_is_free else pass_ms
        price = grant.tokens_per_ms * (draft_ms + grant.step_ms_per_candidate)
        stops = self.rule.should_stop([self._signals[node] for node in path], price)
        return stops and (by_cost or not grant.drafting_is_free)

    def committed(self, kept: Kept, refused: Sequence[int], *, longest: int) -> None:
        """Learn from an outcome.

        `refused` are the verified nodes after the path that agreed; the first of them was tested
        and refused. `longest`: the longest draft that was allowed, in tokens.
        """
        self._is_told = False
        self.stopped = set()
        if self.rule is None:
            return
        drafted = [self._signals[node] for node in (*kept.path, *refused)]
        if drafted:
            self.rule.learn(drafted, len(kept.path), longest=longest)
        self._kept = len(kept.nodes)
        self._signals = {
            number: self._signals[old] for number, old in enumerate(kept.nodes, start=1)
        }

    def state(self) -> Mapping[str, float]:
        """The rule's state by name; empty for `fixed`."""
        return self.rule.metrics() if self.rule is not None else {}

    def news(self) -> Mapping[str, float]:
        """The rule's state in the first call after an outcome; empty in later calls.

        The state serves only the request's metrics, so it must not lengthen every proposal.
        """
        if self._is_told:
            return {}
        self._is_told = True
        return self.state()
