"""k-SEQ (SpecTr, Sun et al. 2023): several independent draws from one draft distribution.

Each draw is accepted with probability min(1, target / (ratio * draft)); the first accepted one
wins. The ratio is the smallest one, between 1 and the number of draws, for which a residual exists
that completes the target's law. Valid only for independent draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.verification.rule import RULES, CandidateKind, DraftDistribution, Promise, Rule
from workers.verification.rules.rejection import acceptance_of, normalized

_BISECTIONS = 30
_TOLERANCE = 1e-6


def some_accepted(one_accepted: float, num_draws: int) -> float:
    """1 - (1 - b)^K: the probability that one of K draws is accepted, each with probability b."""
    if one_accepted >= 1.0:
        return 1.0
    return -math.expm1(num_draws * math.log1p(-one_accepted))


def accepted_mass(
    target_probs_M: NDArray[np.float64], draft_probs_M: NDArray[np.float64], ratio: float
) -> NDArray[np.float64]:
    """For each token, the probability that one draw is this token and is accepted.

    This is min(draft, target / ratio). Its sum is the b of `some_accepted`.
    """
    return np.minimum(draft_probs_M, target_probs_M / ratio)


def smallest_ratio(
    target_probs_M: NDArray[np.float64], draft_probs_M: NDArray[np.float64], num_draws: int
) -> float:
    """The r in [1, K] that solves 1 - (1 - b(r))^K = r b(r), approached from above.

    Both arrays have only the draft's tokens, since b has no other terms. The left side minus the
    right side decreases in r. The output has exactly the target's law for every r at which this
    difference is 0 or less. So the upper end of the bisection is the answer: the tolerance may cost
    acceptance, but the law stays exact.
    """
    low, high = 1.0, float(num_draws)
    for _ in range(_BISECTIONS):
        if high - low <= _TOLERANCE:
            break
        middle = (low + high) / 2
        one = float(accepted_mass(target_probs_M, draft_probs_M, middle).sum())
        if some_accepted(one, num_draws) > middle * one:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True, slots=True, eq=False)
class KSeqNode:
    """The children of one node, drawn independently; equal draws are counted."""

    target_probs_V: NDArray[np.float64]
    draft: DraftDistribution
    num_draws: int
    ratio: float

    @classmethod
    def of(
        cls, target_probs_V: NDArray[np.float64], draft: DraftDistribution, num_draws: int
    ) -> KSeqNode:
        """A node with its smallest ratio."""
        target_probs_M = target_probs_V[draft.token_ids_M]
        ratio = smallest_ratio(target_probs_M, draft.probs_M, num_draws)
        return cls(target_probs_V, draft, num_draws, ratio)

    def acceptance(self, token_id: int) -> float:
        """The probability that one draw of this token is accepted."""
        target_prob = float(self.target_probs_V[token_id])
        return acceptance_of(target_prob / self.ratio, self.draft.prob_of(token_id))

    def refused(self, token_id: int) -> KSeqNode:
        """The same node, since the tests of the draws are independent of each other."""
        return self

    def residual_V(self) -> NDArray[np.float64]:
        """The distribution of the token after all draws were refused.

        It is the target's law minus the contribution of accepted draws. The accepted token follows
        `accepted_mass` divided by its sum. Negative values, from rounding, become 0.
        """
        ids_M = self.draft.token_ids_M
        mass_M = accepted_mass(self.target_probs_V[ids_M], self.draft.probs_M, self.ratio)
        one = float(mass_M.sum())
        if one <= 0.0:
            return self.target_probs_V
        given_M = mass_M * (some_accepted(one, self.num_draws) / one)
        left_V = self.target_probs_V.copy()
        left_V[ids_M] = np.maximum(left_V[ids_M] - given_M, 0.0)
        return normalized(left_V, otherwise_V=self.target_probs_V)


def _begin(
    target_probs_V: NDArray[np.float64], draft: DraftDistribution | None, num_tests: int
) -> KSeqNode:
    assert draft is not None
    return KSeqNode.of(target_probs_V, draft, num_tests)


RULES.add(
    Rule(
        name="kseq",
        help="k-SEQ, for several independent paths of the drafter",
        paper="SpecTr, Sun et al. 2023",
        promise=Promise.LAW,
        exact_for=frozenset({CandidateKind.SAMPLED_CHAIN, CandidateKind.INDEPENDENT_PATHS}),
        drawn_as=CandidateKind.INDEPENDENT_PATHS,
        needs_draft_probs=True,
        begin=_begin,
    )
)
