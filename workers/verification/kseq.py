"""k-SEQ (SpecTr, Sun et al. 2023): several independent draws from one draft distribution.

Each is accepted with min(1, target / (ratio * draft)); the first that is accepted wins. The ratio
between 1 and the number of draws is the smallest for which a residual exists that makes up the
target's law. Valid for independent draws only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.verification.draft_probs import DraftDistribution
from workers.verification.rejection import acceptance_of, normalised

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
    """The probability that one draw is each of the tokens and is accepted: min(draft, target / r).

    Its sum is the b of `some_accepted`.
    """
    return np.minimum(draft_probs_M, target_probs_M / ratio)


def smallest_ratio(
    target_probs_M: NDArray[np.float64], draft_probs_M: NDArray[np.float64], num_draws: int
) -> float:
    """The r in [1, K] that solves 1 - (1 - b(r))^K = r b(r), from above.

    Both arrays are of the draft's tokens only: b has no other terms. Left less right falls with r,
    and the law is exact for every r where it is not above 0; so the upper end of the bisection is
    the answer, and its tolerance costs acceptance, never the law.
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
    """The children of one node, drawn independently, an equal one as often as it was drawn."""

    target_probs_V: NDArray[np.float64]
    draft: DraftDistribution
    num_draws: int
    ratio: float

    @classmethod
    def of(
        cls, target_probs_V: NDArray[np.float64], draft: DraftDistribution, num_draws: int
    ) -> KSeqNode:
        """A node with its best ratio."""
        target_probs_M = target_probs_V[draft.token_ids_M]
        ratio = smallest_ratio(target_probs_M, draft.probs_M, num_draws)
        return cls(target_probs_V, draft, num_draws, ratio)

    def acceptance(self, token_id: int) -> float:
        """The probability that one draw of this token is accepted."""
        target_prob = float(self.target_probs_V[token_id])
        return acceptance_of(target_prob / self.ratio, self.draft.prob_of(token_id))

    def refused(self, token_id: int) -> KSeqNode:
        """The same: the tests of the draws are independent of each other."""
        return self

    def residual_V(self) -> NDArray[np.float64]:
        """What the token follows when all draws were refused.

        The target's law less what the accepted draws gave: the winner follows their mass divided
        by its sum. Clipped at 0 against rounding.
        """
        ids_M = self.draft.token_ids_M
        mass_M = accepted_mass(self.target_probs_V[ids_M], self.draft.probs_M, self.ratio)
        one = float(mass_M.sum())
        if one <= 0.0:
            return self.target_probs_V
        given_M = mass_M * (some_accepted(one, self.num_draws) / one)
        left_V = self.target_probs_V.copy()
        left_V[ids_M] = np.maximum(left_V[ids_M] - given_M, 0.0)
        return normalised(left_V, otherwise_V=self.target_probs_V)
